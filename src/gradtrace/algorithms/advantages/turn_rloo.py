"""Advantages by turn: what was still to be earned from each turn on, against the siblings' same."""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrace.algorithms.advantages.grpo import group_sizes, require_siblings
from gradtrace.algorithms.registry import AdvantageInputs, AdvantageOutputs, masked, register_advantage
from gradtrace.errors import GradtraceError


def turns_by_mask(mask: Tensor) -> Tensor:
    """long[R, T]: the turn of each token that the policy wrote: a turn ends where somebody else's tokens begin."""
    before = torch.nn.functional.pad(mask[:, :-1], (1, 0))
    return ((mask & ~before).cumsum(1) - 1).clamp(min=0)


@register_advantage("turn_rloo")
def turn_rloo(inputs: AdvantageInputs, *, turn_cost: float = 0.0) -> AdvantageOutputs:
    """A of turn k = G_k − mean of the *other* responses' G at their turn k (their last, where they have fewer).

    G_k = R − turn_cost · (turns that follow k): every call costs, and only turns that could still avoid it pay. The
    baseline holds nothing of the response itself, whatever states its siblings were in, so the gradient is unbiased for
    E[R − turn_cost · calls]. With turn_cost 0 it is RLOO's.
    """
    require_siblings("turn_rloo", inputs.group)
    if turn_cost < 0:
        raise GradtraceError(f"turn_rloo: turn_cost={turn_cost}; what a further turn costs is 0 or more.")
    turn = turns_by_mask(inputs.mask)
    last = masked(turn, inputs.mask).amax(1)
    every = torch.arange(int(last.max()) + 1, device=turn.device).expand(len(last), -1)
    following = last[:, None] - torch.minimum(every, last[:, None])
    to_go = inputs.rewards[:, None] - turn_cost * following.to(inputs.rewards)
    siblings = (inputs.group[:, None] == inputs.group).to(to_go)
    others = (group_sizes(inputs.group) - 1)[:, None]
    baseline = (siblings @ to_go - to_go) / others
    return AdvantageOutputs(masked((to_go - baseline).gather(1, turn), inputs.mask))
