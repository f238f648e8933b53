"""GSPO: one importance ratio for the whole response."""

from __future__ import annotations

from gradtrace.algorithms.losses.ppo import clipped_surrogate
from gradtrace.algorithms.registry import LossInputs, LossOutputs, register_policy_loss, straight_through


@register_policy_loss("gspo", plain_at_ratio_one=True)
def gspo(inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossOutputs:
    """Loss, to be minimised: PPO's with s = (π(y)/π_old(y))^{1/|y|}, the geometric mean of the token ratios.

    The value at every token is the response's; the gradient is s·∇log π of the token itself (straight
    through, "GSPO-token"), so that `sequence_mean`, the aggregation to use with it, gives the exact gradient
    of the sequence objective and advantages may still differ by token. A response is clipped as a whole;
    the clip range is a thousandth of PPO's because the mean over tokens hardly moves.
    """
    lengths = inputs.mask.sum(-1, keepdim=True).clamp(min=1)
    sequence_ratio = (inputs.log_ratio.sum(-1, keepdim=True) / lengths).exp()  # [R, 1]
    ratio = straight_through(sequence_ratio, inputs.log_probs)
    loss, was_clipped = clipped_surrogate(ratio, inputs.advantages, clip_low, clip_high)
    return LossOutputs(loss, inputs.clip_metrics(was_clipped))
