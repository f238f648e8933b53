"""Prompts → rollout → reward: everything that happens before the weights move, and validation."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from gradtrace.algorithms import (
    constant_groups,
    cosine_shaping,
    count_groups,
    shortest_shaping,
    soft_overlong_penalty,
)
from gradtrace.algorithms.settings import AlgorithmConfig
from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.metrics import GENERATED, Timer
from gradtrace.policy.rollouts import judge, keep_groups, rollout
from gradtrace.rollout import Sampler, SamplingParams
from gradtrace.tasks.base import Prompt, Task
from gradtrace.tasks.rewards import RewardFunction
from gradtrace.training.components import Components


@dataclass(eq=False)
class Experience:
    """Makes the batch that a training step learns from."""

    task: Task
    reward: RewardFunction
    sampler: Sampler
    params: SamplingParams
    algorithm: AlgorithmConfig
    prompts_per_step: int
    flip_probability: float = 0.0

    @staticmethod
    def of(components: Components, prompts_per_step: int) -> Experience:
        config, task = components.config, components.task
        params = SamplingParams.of(config.rollout, task.stop_token_ids)
        flips = config.reward.flip_probability
        reward, sampler = components.reward, components.sampler
        return Experience(task, reward, sampler, params, config.algorithm, prompts_per_step, flips)

    def collect(self, generator: torch.Generator, timer: Timer) -> tuple[RolloutBatch, dict[str, float]]:
        """A batch with rewards, and metrics of how it came about."""
        if self.algorithm.dynamic_sampling.enable:
            return self._collect_mixed(generator, timer)
        batch, scores = self._rollout(self.task.next_prompts(self.prompts_per_step), generator, timer)
        return batch, self._metrics(batch, scores, batch.reward_parts or [], batches=1)

    def _rollout(self, prompts: list[Prompt], generator: torch.Generator, timer: Timer) -> tuple[RolloutBatch, Tensor]:
        """Responses with rewards, and the rewards before length shaping and penalty."""
        with timer("gen"):
            batch = rollout(self.sampler, prompts, self.params, generator)
        with timer("reward"):
            batch = judge(batch, self.task.tokenizer, self.reward)
            if self.flip_probability:
                batch = flip_rewards(batch, self.flip_probability, generator)
        scores = batch.need("rewards")
        if self.algorithm.length_shaping.shape != "none":
            batch = batch.replace(rewards=scores + self._length_shaping(batch, scores))
        overlong = self.algorithm.overlong
        if overlong.enable:
            penalty = soft_overlong_penalty(
                batch.response_lengths, self.params.max_new_tokens, overlong.buffer, overlong.penalty
            )
            batch = batch.replace(rewards=batch.need("rewards") + penalty)
        return batch, scores

    def _length_shaping(self, batch: RolloutBatch, scores: Tensor) -> Tensor:
        """float[R], to be added to the rewards."""
        shaping = self.algorithm.length_shaping
        right = scores >= shaping.threshold
        if shaping.shape == "cosine":
            return cosine_shaping(batch.response_lengths, right, self.params.max_new_tokens, shaping.strength)
        return shortest_shaping(batch.response_lengths, right, batch.group, shaping.strength)

    def _collect_mixed(self, generator: torch.Generator, timer: Timer) -> tuple[RolloutBatch, dict[str, float]]:
        """DAPO: only groups whose scores differ, from as many rollouts as it takes to fill the batch."""
        wanted = self.prompts_per_step
        parts: list[RolloutBatch] = []
        all_scores: list[Tensor] = []
        all_parts: list[dict[str, float]] = []
        found = sampled = rollouts = 0
        while found < wanted and rollouts < self.algorithm.dynamic_sampling.max_batches:
            # As many prompts as the share of mixed groups so far says are needed, and never more than a batch.
            share = max(found, 1) / max(sampled, 1)
            count = min(wanted, math.ceil((wanted - found) / share))
            batch, scores = self._rollout(self.task.next_prompts(count), generator, timer)
            all_scores.append(scores)
            all_parts += batch.reward_parts or []
            mixed = batch.group[~constant_groups(scores, batch.group)].unique()[: wanted - found]
            parts.append(keep_groups(batch, mixed))
            found, sampled, rollouts = found + len(mixed), sampled + count, rollouts + 1
        if found == 0:
            scores = torch.cat(all_scores)
            raise GradtraceError(
                f"Dynamic sampling found no prompt whose {self.params.n} responses differ in reward, in {sampled} "
                f"prompts of {rollouts} rollouts (mean reward {float(scores.mean()):.3f}). The task is too hard or "
                "too easy for this model, or the reward is constant; raise rollout.n, or turn "
                "algorithm.dynamic_sampling.enable off to look at the responses."
            )
        batch = RolloutBatch.concat([part for part in parts if len(part)], self.sampler.pad_token_id)
        metrics = self._metrics(batch, torch.cat(all_scores), all_parts, rollouts)
        return batch, {
            **metrics,
            "rollout/groups_sampled": float(sampled),
            "rollout/groups_kept": float(found),
        }

    def _metrics(
        self, batch: RolloutBatch, scores: Tensor, parts: list[dict[str, float]], batches: int
    ) -> dict[str, float]:
        """Of a step's batch; `scores` and `parts` of rewards are those of all responses that were sampled for it."""
        counts = count_groups(batch.need("rewards"), batch.group)
        return {
            GENERATED: float(len(scores)),
            "critic/score/mean": float(scores.mean()),
            "rollout/groups_mixed": counts.mixed / counts.total,
            "rollout/groups_constant": counts.constant / counts.total,
            "rollout/batches": float(batches),
            **{f"reward_part/{name}": sum(own[name] for own in parts) / len(parts) for name in chain(*parts[:1])},
        }


def flip_rewards(batch: RolloutBatch, probability: float, generator: torch.Generator) -> RolloutBatch:
    """The batch with rewards r turned into 1 − r at random, and marked so: a verifier that errs."""
    flipped, rewards = torch.rand(len(batch), generator=generator) < probability, batch.need("rewards")
    return batch.replace(rewards=torch.where(flipped, 1.0 - rewards, rewards), flipped=flipped)


# ---------------------------------------------------------------- validation


def validate(components: Components) -> dict[str, float]:
    """`val-core/SOURCE/reward/mean@n` and `…/pass@k`, from several responses to prompts that are never trained on.

    Always the same prompts and the same random numbers, so that differences come from the policy.
    """
    run, task = components.config, components.task
    config = run.trainer.validation
    params = SamplingParams.of(config, task.stop_token_ids, max_new_tokens=run.rollout.max_new_tokens)
    generator = torch.Generator().manual_seed(run.trainer.seed)
    prompts = task.validation_prompts(config.prompts)
    if not prompts:
        return {}
    batch = judge(rollout(components.sampler, prompts, params, generator), task.tokenizer, components.reward)
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
