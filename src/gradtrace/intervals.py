"""Intervals of means that keep their promise for few values, and for shares near 0 and 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np

LEVEL = 0.95
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(200)


@dataclass(frozen=True)
class Interval:
    """A mean and the ends of its interval; NaN where there are too few values for one."""

    mean: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.2f}, {self.high:.2f}]"

    @property
    def half(self) -> float:
        """Half the width."""
        return (self.high - self.low) / 2

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


@cache
def t_quantile(freedom: float, level: float = LEVEL) -> float:
    """How many standard errors a two-sided interval of Student's t reaches to each side; `freedom` need not be whole
    (Welch)."""
    if freedom < 1:
        return math.inf
    if freedom > 10_000:
        return NormalDist().inv_cdf((1 + level) / 2)

    def mass(end: float) -> float:
        """∫ cos^(ν−1) from 0 to `end`: as a share of that up to π/2 it is P(|T| < √ν · tan(end))."""
        return end / 2 * float(_WEIGHTS @ np.cos(end * (_NODES + 1) / 2) ** (freedom - 1))

    wanted = level * mass(math.pi / 2)
    low, high = 0.0, math.pi / 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if mass(middle) < wanted else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def mean_interval(values: Sequence[float]) -> Interval:
    """Of values that are independent of each other (seeds, groups, prompts): 95 % by Student's t. Values that are NaN
    are left out."""
    found = np.asarray([value for value in values if not math.isnan(value)], dtype=np.float64)
    if len(found) < 2:
        return Interval(float(found[0]) if len(found) else math.nan, math.nan, math.nan, len(found))
    mean = float(found.mean())
    half = t_quantile(len(found) - 1) * float(found.std(ddof=1)) / math.sqrt(len(found))
    return Interval(mean, mean - half, mean + half, len(found))


def paired_difference(values: Sequence[float], base: Sequence[float]) -> Interval:
    """Mean of values − base, one by one: what both share (same prompts, same start) drops out."""
    return mean_interval([value - other for value, other in zip(values, base, strict=True)])


def welch_difference(values: Sequence[float], base: Sequence[float]) -> Interval:
    """Difference of the means of two independent samples whose variances may differ."""
    a, b = np.asarray(values, dtype=np.float64), np.asarray(base, dtype=np.float64)
    mean, n = float(a.mean() - b.mean()), min(len(a), len(b))
    if n < 2:
        return Interval(mean, math.nan, math.nan, n)
    parts = float(a.var(ddof=1)) / len(a), float(b.var(ddof=1)) / len(b)
    total = sum(parts)
    half = 0.0
    if total > 0:
        freedom = total**2 / (parts[0] ** 2 / (len(a) - 1) + parts[1] ** 2 / (len(b) - 1))
        half = t_quantile(freedom) * math.sqrt(total)
    return Interval(mean, mean - half, mean + half, n)


def bounded_interval(values: Sequence[float], imagined: dict[float, float]) -> Interval:
    """Of the mean of values that cannot leave an interval, such as rates of success.

    Thirty of thirty right does not mean that everything always is. So some more values are imagined, at the bounds,
    with these weights (value → weight; Agresti and Coull for a share, Agresti and Min for a difference of two): the
    interval then keeps its promise where all values are equal, too. It never leaves the bounds.
    """
    found = np.asarray(values, dtype=np.float64)
    everything = np.concatenate([found, list(imagined)])
    weights = np.concatenate([np.ones(len(found)), list(imagined.values())])
    total = weights.sum()
    centre = float(weights @ everything) / total
    variance = float(weights @ (everything - centre) ** 2) / total
    half = t_quantile(max(1.0, total - 1)) * math.sqrt(variance / total)
    mean = float(found.mean())
    low, high = max(min(imagined), min(centre - half, mean)), min(max(imagined), max(centre + half, mean))
    return Interval(mean, low, high, len(found))


SHARE = {0.0: 2.0, 1.0: 2.0}
"""What `bounded_interval` imagines for values between 0 and 1."""
DIFFERENCE = {-1.0: 0.5, 0.0: 1.0, 1.0: 0.5}
"""The same for differences of two of them."""
