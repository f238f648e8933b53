"""Why a step has no influence rows, in words."""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.trace.schema import GroupStatus


def why_empty(batch: RolloutBatch, status: Tensor) -> tuple[str, str]:
    """The cause of a trace without rows (a name to count it by) and a sentence about it, with what to do."""
    if bool((status == int(GroupStatus.NON_FINITE)).any()):
        return "non_finite", (
            "the gradients were not finite, so that the optimizer made no step either: lower actor.optim.lr, and look "
            "at the rewards and advantages of this step"
        )
    if bool((status == int(GroupStatus.NOT_CAPTURED)).any()):
        return "not_captured", (
            "the hooks saw none of the tokens of the groups with mixed rewards: `gradtrace doctor --model` shows which "
            "layers can be traced, and debug_backward_captures how often they fired"
        )
    return _no_contrast(batch)


def _no_contrast(batch: RolloutBatch) -> tuple[str, str]:
    """No group holds accepted and rejected responses: for which reason."""
    sizes = torch.bincount(batch.group)
    if int(sizes.max()) == 1:
        return (
            "one_response",
            "every prompt has one response, and there is nothing to compare it with: raise rollout.n",
        )
    if batch.kept is not None and not bool(batch.kept.all()):
        return "selection", (
            "selection left no group with accepted and rejected responses: keep more of the batch (trainer.tracin.…)"
        )
    if _all_siblings_equal(batch):
        return "no_diversity", (
            "all responses to a prompt are the same: raise rollout.temperature, or the policy has lost its entropy"
        )
    rewards = batch.need("rewards")
    low, high = float(rewards.min()), float(rewards.max())
    if low == high:
        cause, judged = "all_wrong", "wrong: the task is too hard for it"
        if high > 0:
            cause, judged = "all_right", "right: the task is too easy for this policy"
        return cause, (
            f"all {len(batch)} responses have the reward {high:g}, as if all were {judged}, or the reward is constant"
        )
    return "constant_groups", (
        f"in each of the {len(sizes)} groups all responses have the same reward (from {low:g} to {high:g} over the "
        "groups): prompts are too easy or too hard; raise rollout.n, or turn algorithm.dynamic_sampling.enable on"
    )


def _all_siblings_equal(batch: RolloutBatch) -> bool:
    texts = [tuple(response) for response in batch.response_ids]
    return len(set(zip(batch.group.tolist(), texts, strict=True))) == len(set(batch.group.tolist()))
