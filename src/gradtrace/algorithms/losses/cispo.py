"""CISPO: clip the importance weight, never the gradient."""

from __future__ import annotations

from gradtrace.algorithms.registry import LossInputs, LossOutputs, register_policy_loss


@register_policy_loss("cispo", plain_at_ratio_one=True)
def cispo(inputs: LossInputs, *, clip_low: float = 1.0, clip_high: float = 4.0) -> LossOutputs:
    """Loss, to be minimised: −sg(clip(r, 1−clip_low, 1+clip_high))·A·log π, with sg = no gradient.

    Where PPO silences a token whose ratio left the range, here it keeps its gradient, at a bounded weight.
    The defaults do not bound it from below, as in MiniMax-M1, and cap it at 5, as TRL advises after ScaleRL.
    """
    ratio = inputs.log_ratio.exp().detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -weight * inputs.advantages * inputs.log_probs
    return LossOutputs(loss, inputs.clip_metrics(ratio != weight))
