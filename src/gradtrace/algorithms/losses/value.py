"""The critic's loss for PPO with GAE."""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrace.algorithms.types import LossOutputs, masked_column


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
