"""Means over prompts with bootstrap intervals. A prompt is what is resampled: its responses are not independent."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from gradtrace.training.validation import pass_at_k

Floats = NDArray[numpy.float64]
RESAMPLES = 10_000
LEVEL = 0.95
BATCH = 4_000_000
"""Resampled values held at once."""


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts and its 95 % percentile interval."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def estimate(per_prompt: Floats, seed: int = 0) -> Estimate:
    """float[P]: one value per prompt."""
    means = bootstrap_means(per_prompt, seed)
    low, high = numpy.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(per_prompt.mean()), float(low), float(high))


def bootstrap_means(per_prompt: Floats, seed: int = 0) -> Floats:
    """float[RESAMPLES]: means of prompts drawn with replacement."""
    generator = numpy.random.default_rng(seed)
    count = len(per_prompt)
    rows = max(1, BATCH // count)
    parts = []
    for start in range(0, RESAMPLES, rows):
        chosen = generator.integers(count, size=(min(rows, RESAMPLES - start), count))
        parts.append(per_prompt[chosen].mean(-1))
    return numpy.concatenate(parts)


def mean_rewards(rewards: list[list[float]]) -> Floats:
    """float[P]: mean@n of each prompt."""
    return numpy.array([numpy.mean(row) for row in rewards])


def pass_rates(rewards: list[list[float]], k: int, threshold: float = 1.0) -> Floats:
    """float[P]: the unbiased pass@k of each prompt."""
    return numpy.array([pass_at_k(len(row), sum(r >= threshold for r in row), k) for row in rewards])


def scores(rewards: list[list[float]], ks: list[int]) -> dict[str, Estimate]:
    """{`mean@n`: …, `pass@k`: … for each k}."""
    n = len(rewards[0])
    found = {f"mean@{n}": estimate(mean_rewards(rewards))}
    found.update({f"pass@{k}": estimate(pass_rates(rewards, k)) for k in ks})
    return found


@dataclass(frozen=True)
class Paired:
    """B minus A, prompt by prompt."""

    difference: Estimate
    better: int
    """Prompts on which B is better."""
    worse: int
    equal: int


def paired(first: Floats, second: Floats) -> Paired:
    """Compare two float[P] over the same prompts in the same order."""
    difference = second - first
    better, worse = int((difference > 0).sum()), int((difference < 0).sum())
    return Paired(estimate(difference), better, worse, len(difference) - better - worse)
