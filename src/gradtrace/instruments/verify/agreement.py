"""How well predictions order what was measured, with intervals over groups."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradtrace.intervals import Interval, mean_interval


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


def interval(values: Sequence[float]) -> Interval:
    """Mean of correlations over groups with a 95 % interval, Student's, within −1 and 1; NaN are left out."""
    found = mean_interval(values)
    return dataclasses.replace(found, low=max(found.low, -1.0), high=min(found.high, 1.0))
