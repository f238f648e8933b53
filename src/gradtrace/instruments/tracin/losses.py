"""Losses Σ w_t ℓ_t of responses (ℓ_t: a token's log-prob)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradtrace.algorithms import Denominator, token_weights
from gradtrace.batch import RolloutBatch

TokenWeights = Callable[[Tensor], Tensor]
"""Response mask bool[R, T] → float[R, T]: how much the loss of each token counts in the loss of the batch."""


@dataclass(frozen=True, eq=False)
class Weighted:
    """Some responses of a batch, and the weight of every token's log-prob in their loss."""

    batch: RolloutBatch
    rows: Tensor
    """long[b]: the responses that count."""
    weights: Tensor
    """float[R, T], for the whole batch."""


def training_losses(batch: RolloutBatch, weigh: TokenWeights) -> Weighted:
    """Every response's own term of the policy gradient; those without an advantage have none and are left out."""
    weights = -batch.need("advantages") * weigh(batch.response_mask)
    if batch.loss_weights is not None:
        weights = weights * batch.loss_weights
    return Weighted(batch, with_advantage(batch), weights)


def validation_losses(batch: RolloutBatch, rows: Tensor | None = None) -> Weighted:
    """L_val = −mean_r(A_r Σ_t ℓ_t) of the whole set, the share of `rows` (all of them by default)."""
    weights = torch.where(batch.response_mask, batch.need("advantages"), 0.0) / -len(batch)
    rows = torch.arange(len(batch)) if rows is None else rows
    counted = rows[(weights[rows] != 0).any(1)]
    # A part of the set without a contrast has a zero gradient; that is no error.
    return Weighted(batch, counted if len(counted) else rows[:1], weights)


def aggregated(aggregation: str, max_response_length: int) -> TokenWeights:
    """The weights of tokens in a batch whose loss is aggregated this way."""
    return lambda mask: token_weights(mask, aggregation, Denominator.of(mask, max_response_length))


def with_advantage(batch: RolloutBatch) -> Tensor:
    """long: the responses with an advantage that is not zero; the others have no gradient."""
    return (batch.need("advantages") != 0).any(1).nonzero().squeeze(-1)


def has_signal(batch: RolloutBatch) -> bool:
    """Whether any response of the batch has a gradient."""
    return len(batch) > 0 and len(with_advantage(batch)) > 0
