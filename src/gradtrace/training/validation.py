"""Validation: several responses to prompts that are never trained on; mean@n and pass@k."""

from __future__ import annotations

import math
from collections import defaultdict

import torch

from gradtrace.policy.rollouts import judge, rollout
from gradtrace.rollout import SamplingParams
from gradtrace.training.parts import Parts


def validate(parts: Parts) -> dict[str, float]:
    """`val-core/SOURCE/reward/mean@n` and `…/pass@k`, one pair for each source of prompts.

    Always the same prompts and the same random numbers, so that differences come from the policy.
    """
    run, task = parts.config, parts.task
    config = run.trainer.validation
    params = SamplingParams.of(config, task.stop_token_ids, max_new_tokens=run.rollout.max_new_tokens)
    generator = torch.Generator().manual_seed(run.trainer.seed)
    prompts = task.validation_prompts(config.prompts)
    if not prompts:
        return {}
    batch = judge(rollout(parts.sampler, prompts, params, generator), task.tokenizer, parts.reward)
    rewards = batch.need("rewards").view(len(prompts), config.n)
    rows: dict[str, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        rows[prompt.item["source"]].append(index)
    metrics = {}
    for source, indexes in rows.items():
        own = rewards[indexes]
        metrics[f"val-core/{source}/reward/mean@{config.n}"] = float(own.mean())
        right = (own >= config.success_threshold).sum(-1).tolist()
        for k in config.pass_k:
            estimates = [pass_at_k(config.n, count, k) for count in right]
            metrics[f"val-core/{source}/reward/pass@{k}"] = sum(estimates) / len(estimates)
    return metrics


def pass_at_k(n: int, right: int, k: int) -> float:
    """Probability that at least one of k responses drawn from these n, without replacement, is right."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)
