"""Group-relative advantages: a response against the other answers to the same prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrace.algorithms.groups import constant_groups, group_index
from gradtrace.algorithms.registry import AdvantageInputs, AdvantageOutputs, masked, register_advantage
from gradtrace.errors import GradtraceError


def group_sizes(group: Tensor) -> Tensor:
    """long[R]: the size of each response's group."""
    index, groups = group_index(group)
    return torch.bincount(index, minlength=groups)[index]


def require_siblings(name: str, group: Tensor) -> None:
    """A group of one has nothing to be compared with; its advantage would be zero or not a number."""
    sizes = group_sizes(group)
    if bool((sizes < 2).any()):
        lonely = int(group[sizes < 2][0])
        raise GradtraceError(
            f"'{name}' compares the responses to one prompt with one another, and group {lonely} has only "
            "one: n=1 carries no contrast. Sample n ≥ 2 responses per prompt, or use an estimator that "
            "needs no siblings: reinforce_plus_plus or gae."
        )


def group_mean(values: Tensor, group: Tensor) -> Tensor:
    """float[R]: the mean of each response's group."""
    index, groups = group_index(group)
    sums = values.new_zeros(groups).index_add(0, index, values)
    return sums[index] / group_sizes(group)


def centred(rewards: Tensor, group: Tensor) -> Tensor:
    """float[R]: reward minus group mean; exactly zero in a constant group, where rounding in the mean would
    otherwise be blown up by a division by the equally tiny std."""
    return (rewards - group_mean(rewards, group)).masked_fill(constant_groups(rewards, group), 0.0)


def spread(per_response: Tensor, mask: Tensor) -> Tensor:
    """float[R] → float[R, T]: the same number at every token, zero in the padding."""
    return masked(per_response.unsqueeze(-1).expand(mask.shape), mask)


@register_advantage("grpo")
def grpo(inputs: AdvantageInputs, *, normalize_std: bool = True, epsilon: float = 1e-6) -> AdvantageOutputs:
    """A = (R − mean) / (std + ε) within the group; the sample std, divisor n − 1, as verl and TRL have it.

    `normalize_std=False` leaves the division out, which keeps prompts that are nearly always or nearly never
    solved from being weighted up.
    """
    require_siblings("grpo", inputs.group)
    advantages = centred(inputs.rewards, inputs.group)
    if normalize_std:
        sizes = group_sizes(inputs.group)
        variance = group_mean(advantages.square(), inputs.group) * sizes / (sizes - 1)
        advantages = advantages / (variance.sqrt() + epsilon)
    return AdvantageOutputs(spread(advantages, inputs.mask))


@register_advantage("dr_grpo")
def dr_grpo(inputs: AdvantageInputs) -> AdvantageOutputs:
    """A = R − group mean. Dr. GRPO is this together with the `fixed_length` aggregation."""
    require_siblings("dr_grpo", inputs.group)
    return AdvantageOutputs(spread(centred(inputs.rewards, inputs.group), inputs.mask))
