"""Which responses are accepted and which rejected, and which groups can teach anything. Defined here only.

In a group (one prompt) whose rewards differ, a response is *accepted* if its reward is the group's maximum,
else *rejected*. A group with one constant reward, a group of one included, carries no contrast: its
responses are neither.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradtrace.algorithms.registry import check_rewards


@dataclass(frozen=True)
class GroupCounts:
    total: int
    constant: int
    mixed: int


def group_index(group: Tensor) -> tuple[Tensor, int]:
    """Group numbers long[R] as 0 … G−1, and G. The given numbers may have gaps."""
    ids, index = torch.unique(group, return_inverse=True)
    return index, len(ids)


def group_extremes(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum and maximum reward of each response's group, both float[R]."""
    check_rewards(rewards, group)
    index, groups = group_index(group)
    zeros = rewards.new_zeros(groups)
    low = zeros.scatter_reduce(0, index, rewards, "amin", include_self=False)
    high = zeros.scatter_reduce(0, index, rewards, "amax", include_self=False)
    return low[index], high[index]


def constant_groups(rewards: Tensor, group: Tensor) -> Tensor:
    """bool[R]: True for the responses whose group has one and the same reward throughout."""
    low, high = group_extremes(rewards, group)
    return low == high


def accepted(rewards: Tensor, group: Tensor, threshold: float | None = None) -> Tensor:
    """bool[R]: the best of a group whose rewards differ; or, with a threshold, those of at least this reward."""
    if threshold is not None:
        return rewards >= threshold
    low, high = group_extremes(rewards, group)
    return (low != high) & (rewards == high)


def rejected(rewards: Tensor, group: Tensor) -> Tensor:
    """bool[R]: less than the best of a group whose rewards differ."""
    low, high = group_extremes(rewards, group)
    return (low != high) & (rewards < high)


def count_groups(rewards: Tensor, group: Tensor) -> GroupCounts:
    """How many groups there are, how many have one constant reward, how many are mixed."""
    total = len(torch.unique(group))
    constant = len(torch.unique(group[constant_groups(rewards, group)]))
    return GroupCounts(total=total, constant=constant, mixed=total - constant)
