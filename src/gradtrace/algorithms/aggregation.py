"""From per-token values to one number, such that micro-batches add up.

A mean taken inside a micro-batch depends on how the mini-batch was cut. So the denominator is counted once,
over the whole mini-batch, and every micro-batch divides its *sum* by it:

    denominator = Denominator.of(mini.response_mask, max_length=1024)
    for micro in split(mini):
        aggregate(outputs.loss, micro.response_mask, "token_mean", denominator).backward()

The losses and gradients of any split by rows then sum to those of the mini-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradtrace.algorithms.registry import masked, nearest
from gradtrace.errors import GradtraceError

AGGREGATIONS = ("token_mean", "sequence_mean", "fixed_length")


@dataclass(frozen=True)
class Denominator:
    """The numbers that a mini-batch is divided by. Add those of several ranks to get that of all of them."""

    tokens: int
    sequences: int
    """Rows with at least one token: a row that selection masked out does not count."""
    max_length: int | None = None
    """The length limit of a response; `fixed_length` divides by it whatever the lengths are."""

    @staticmethod
    def of(mask: Tensor, max_length: int | None = None) -> Denominator:
        return Denominator(int(mask.sum()), int(mask.any(-1).sum()), max_length)

    def __add__(self, other: Denominator) -> Denominator:
        if self.max_length != other.max_length:
            raise ValueError(f"length limits differ: {self.max_length} and {other.max_length}")
        return Denominator(self.tokens + other.tokens, self.sequences + other.sequences, self.max_length)


def token_weights(
    mask: Tensor, mode: str, denominator: Denominator | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """float[R, T] without gradient: aggregate(values) = Σ weights · values. Zero outside the mask.

    Dividing by these weights undoes the aggregation, which attribution needs: it traces sums.
    """
    denominator = denominator or Denominator.of(mask)
    tokens, sequences = max(denominator.tokens, 1), max(denominator.sequences, 1)
    weights = mask.to(dtype)
    if mode == "token_mean":
        return weights / tokens
    if mode == "sequence_mean":
        return weights / weights.sum(-1, keepdim=True).clamp(min=1) / sequences
    if mode == "fixed_length":
        if not denominator.max_length:
            raise GradtraceError(
                "The aggregation 'fixed_length' divides by the length limit of a response: "
                "give the Denominator a max_length."
            )
        return weights / (sequences * denominator.max_length)
    raise GradtraceError(f"There is no aggregation '{mode}': {nearest(mode, AGGREGATIONS)}")


def aggregate(values: Tensor, mask: Tensor, mode: str = "token_mean", denominator: Denominator | None = None) -> Tensor:
    """Scalar from values float[R, T].

    - `token_mean`: Σ values / tokens. Every token weighs the same (DAPO).
    - `sequence_mean`: mean over the tokens of a response, then over responses (GRPO as first published).
    - `fixed_length`: Σ values / (responses · max_length). No length bias (Dr. GRPO).

    `denominator` counts the mini-batch that this micro-batch is cut from; without it, `mask` is all there is.
    """
    weights = token_weights(mask, mode, denominator, values.dtype)
    return (masked(values, mask) * weights).sum()
