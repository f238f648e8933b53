"""How well predictions order what was measured, with intervals over groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDS = 4000


def ranks(values: Tensor) -> Tensor:
    """float64: ranks from 0; equal values share the mean of theirs."""
    values = values.double()
    _, where, counts = torch.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum(0).double() - (counts.double() + 1) / 2)[where]


def spearman(predicted: Tensor, measured: Tensor) -> float:
    """Rank correlation; NaN where either does not vary."""
    first, second = (r - r.mean() for r in (ranks(predicted), ranks(measured)))
    length = float(first.norm() * second.norm())
    return float(first @ second) / length if length else math.nan


@dataclass(frozen=True)
class Interval:
    mean: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.2f}, {self.high:.2f}]"


def interval(values: Sequence[float], seed: int = 0) -> Interval:
    """Mean over groups with a 95 % bootstrap interval; values that are NaN are left out."""
    found = torch.tensor([value for value in values if not math.isnan(value)], dtype=torch.float64)
    if not len(found):
        return Interval(math.nan, math.nan, math.nan, 0)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(found), (ROUNDS, len(found)), generator=generator)
    low, high = torch.quantile(
        found[drawn].mean(1), torch.tensor([0.025, 0.975], dtype=torch.float64)
    ).tolist()
    return Interval(float(found.mean()), low, high, len(found))


def difference(first: Sequence[float], second: Sequence[float], seed: int = 0) -> Interval:
    """Of two scores on the same groups: paired, so that what makes a group hard for both drops out."""
    return interval([a - b for a, b in zip(first, second, strict=True)], seed)
