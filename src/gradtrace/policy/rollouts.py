"""Rollouts with rewards and advantages: sampled, judged by the task's reward, and compared within their group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradtrace.algorithms import AdvantageInputs, AdvantageOutputs, Algorithm
from gradtrace.batch import RolloutBatch
from gradtrace.rollout import Sampler, SamplingParams
from gradtrace.tasks.base import Item, Prompt

Judge = Callable[[list[str], list[Item]], list[float]]
"""(texts of responses, their items) → a reward for each; a `RewardFunction` is one."""


def rollout(
    sampler: Sampler, prompts: list[Prompt], params: SamplingParams, generator: torch.Generator
) -> RolloutBatch:
    ids, items = [prompt.ids for prompt in prompts], [prompt.item for prompt in prompts]
    return sampler.generate(ids, params, generator=generator, items=items)


def judge(batch: RolloutBatch, tokenizer: Any, reward: Judge) -> RolloutBatch:
    """The batch with texts and rewards, and with the parts of rewards that are sums."""
    texts = tokenizer.batch_decode(batch.response_ids, skip_special_tokens=True)
    items = [batch.items[group] for group in batch.group.tolist()]
    rewards = torch.tensor(reward(texts, items), dtype=torch.float32)
    sums: dict[str, list[float]] = getattr(reward, "parts", {})
    parts = [dict(zip(sums, own, strict=True)) for own in zip(*sums.values(), strict=True)] if sums else None
    return batch.replace(texts=texts, rewards=rewards, reward_parts=parts)


def keep_groups(batch: RolloutBatch, groups: Tensor) -> RolloutBatch:
    """The batch reduced to `groups` (long, ascending), which are renumbered 0, 1 …"""
    part = batch.select(torch.isin(batch.group, groups))
    return part.replace(
        prompts=[batch.prompts[group] for group in groups.tolist()],
        items=[batch.items[group] for group in groups.tolist()] if batch.items else [],
        group=torch.searchsorted(groups, part.group),
    )


def add_rollouts(batch: RolloutBatch, more: RolloutBatch, pad_id: int) -> RolloutBatch:
    """A judged batch with further responses after its own, in groups of their own; their rewards are true."""
    flipped = None if batch.flipped is None else torch.zeros(len(more), dtype=torch.bool)
    more = more.replace(flipped=flipped, advantages=None, returns=None)
    return RolloutBatch.concat([batch, more], pad_id)


def add_advantages(batch: RolloutBatch, estimator: Algorithm[AdvantageInputs, AdvantageOutputs]) -> RolloutBatch:
    """The batch with advantages, and with returns where the estimator has a critic."""
    columns: dict[str, Any] = {name: getattr(batch, name) for name in estimator.needs}
    outputs = estimator(AdvantageInputs(batch.need("rewards"), batch.group, batch.response_mask, **columns))
    return batch.replace(advantages=outputs.advantages, returns=outputs.returns)
