"""Intervals over seeds. All are 95 % intervals of Student's t: few seeds, unknown variance, means taken as normal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Two-sided 95 % quantiles for 1 … 30 degrees of freedom.
_T95 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
_Z95 = 1.959964


def t_quantile(freedom: float) -> float:
    """Half-width of a two-sided 95 % interval in standard errors; `freedom` need not be whole (Welch)."""
    if freedom < 1:
        return math.inf
    if freedom >= len(_T95):
        return (
            _Z95
            + (_Z95**3 + _Z95) / (4 * freedom)
            + (5 * _Z95**5 + 16 * _Z95**3 + 3 * _Z95) / (96 * freedom**2)
        )
    below = math.floor(freedom)
    share = freedom - below
    # In 1/freedom the quantile is close to a straight line.
    low, high = _T95[below - 1], _T95[below]
    weight = (1 / below - 1 / freedom) / (1 / below - 1 / (below + 1)) if share else 0.0
    return low + weight * (high - low)


@dataclass(frozen=True)
class Interval:
    mean: float
    half: float
    """The mean and half the width of its interval; NaN where there are too few values for an interval."""
    n: int

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half


def mean_interval(values: Sequence[float]) -> Interval:
    array = np.asarray(values, dtype=np.float64)
    if not len(array):
        return Interval(math.nan, math.nan, 0)
    if len(array) == 1:
        return Interval(float(array[0]), math.nan, 1)
    half = t_quantile(len(array) - 1) * float(array.std(ddof=1)) / math.sqrt(len(array))
    return Interval(float(array.mean()), half, len(array))


def paired_difference(values: Sequence[float], base: Sequence[float]) -> Interval:
    """Mean of values − base, seed by seed: noise that both share (same prompts, same start) cancels."""
    return mean_interval([value - other for value, other in zip(values, base, strict=True)])


def welch_difference(values: Sequence[float], base: Sequence[float]) -> Interval:
    """Difference of the means of two independent samples whose variances may differ."""
    a, b = np.asarray(values, dtype=np.float64), np.asarray(base, dtype=np.float64)
    mean, n = float(a.mean() - b.mean()), min(len(a), len(b))
    if n < 2:
        return Interval(mean, math.nan, n)
    parts = float(a.var(ddof=1)) / len(a), float(b.var(ddof=1)) / len(b)
    total = sum(parts)
    if total == 0:
        return Interval(mean, 0.0, n)
    freedom = total**2 / (parts[0] ** 2 / (len(a) - 1) + parts[1] ** 2 / (len(b) - 1))
    return Interval(mean, t_quantile(freedom) * math.sqrt(total), n)
