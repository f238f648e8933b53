"""PPO's clipped surrogate, with DAPO's clip-higher and the dual clip; and the loss of its critic."""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrace.algorithms.registry import LossInputs, LossOutputs, masked_column, register_policy_loss
from gradtrace.errors import GradtraceError


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """max(−A·r, −A·clip(r, 1−low, 1+high)) and where the clipped side was the larger, both [R, T]."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


@register_policy_loss("ppo", plain_at_ratio_one=True)
def ppo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> LossOutputs:
    """Loss, to be minimised: max(−A·r, −A·clip(r, 1−clip_low, 1+clip_high)) with r = π/π_old.

    `clip_high` above `clip_low` is DAPO's clip-higher (0.2 and 0.28): rare tokens may grow further.
    `dual_clip` c > 1 caps the loss of a token with A < 0 at −A·c, where PPO alone leaves an exploding ratio
    unbounded; None leaves it out. On policy (r = 1) the gradient is −A·∇log π.
    """
    if dual_clip is not None and dual_clip <= 1:
        raise GradtraceError(f"dual_clip is {dual_clip}: it bounds the ratio from above and must exceed 1.")
    loss, was_clipped = clipped_surrogate(inputs.log_ratio.exp(), inputs.advantages, clip_low, clip_high)
    metrics = inputs.clip_metrics(was_clipped)
    if dual_clip is not None:
        cap = -inputs.advantages * dual_clip
        was_capped = (inputs.advantages < 0) & (loss > cap)
        loss = torch.where(was_capped, cap, loss)
        metrics["actor/pg_clipfrac_lower"] = was_capped.to(loss.dtype)
    return LossOutputs(loss, metrics)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None = 0.2
) -> LossOutputs:
    """Loss, to be minimised: ½·max((V − R)², (clip(V, V_old ± clip) − R)²); with clip=None, ½(V − R)².

    The larger of the two is taken: a critic that has moved by more than `clip` gets no gradient for
    moving further towards its target, and the full one for coming back.
    """
    values = masked_column("values", values, mask)
    old_values = masked_column("old_values", old_values, mask).detach()
    returns = masked_column("returns", returns, mask).detach()
    squared = (values - returns).square()
    if clip is None:
        return LossOutputs(0.5 * squared, {"critic/vf_clipfrac": torch.zeros_like(squared)})
    near = old_values + (values - old_values).clamp(-clip, clip)
    squared_near = (near - returns).square()
    was_clipped = squared_near > squared
    return LossOutputs(0.5 * torch.maximum(squared, squared_near), {"critic/vf_clipfrac": was_clipped.to(values.dtype)})
