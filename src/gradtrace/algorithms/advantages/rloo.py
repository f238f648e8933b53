"""REINFORCE leave-one-out."""

from __future__ import annotations

from gradtrace.algorithms.advantages.grpo import centred, group_sizes, require_siblings, spread
from gradtrace.algorithms.registry import AdvantageInputs, AdvantageOutputs, register_advantage


@register_advantage("rloo")
def rloo(inputs: AdvantageInputs) -> AdvantageOutputs:
    """A = R − mean of the *other* responses of the group: a baseline that is independent of the response.

    R_i − (n·mean − R_i)/(n − 1) = (R_i − mean)·n/(n − 1).
    """
    require_siblings("rloo", inputs.group)
    sizes = group_sizes(inputs.group)
    advantages = centred(inputs.rewards, inputs.group) * sizes / (sizes - 1)
    return AdvantageOutputs(spread(advantages, inputs.mask))
