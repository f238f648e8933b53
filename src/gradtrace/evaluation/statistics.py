"""Means over prompts with intervals. A prompt is what counts as one: its responses are not independent."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from gradtrace.intervals import DIFFERENCE, SHARE, Interval, bounded_interval, mean_interval
from gradtrace.training.validation import pass_at_k

Floats = NDArray[numpy.float64]


def estimate(per_prompt: Floats, imagined: dict[float, float] | None = None) -> Interval:
    """float[P], one value per prompt → their mean. Values within the bounds of `imagined` (by default 0 and 1) have an
    interval that holds near the bounds, too; rewards on another scale have Student's."""
    imagined = imagined or SHARE
    if per_prompt.min() < min(imagined) or per_prompt.max() > max(imagined):
        return mean_interval(per_prompt.tolist())
    return bounded_interval(per_prompt.tolist(), imagined)


def mean_rewards(rewards: list[list[float]]) -> Floats:
    """float[P]: mean@n of each prompt."""
    return numpy.array([numpy.mean(row) for row in rewards])


def pass_rates(rewards: list[list[float]], k: int, threshold: float = 1.0) -> Floats:
    """float[P]: the unbiased pass@k of each prompt."""
    return numpy.array([pass_at_k(len(row), sum(r >= threshold for r in row), k) for row in rewards])


def scores(rewards: list[list[float]], ks: list[int]) -> dict[str, Interval]:
    """{`mean@n`: …, `pass@k`: … for each k}."""
    n = len(rewards[0])
    found = {f"mean@{n}": estimate(mean_rewards(rewards))}
    found.update({f"pass@{k}": estimate(pass_rates(rewards, k)) for k in ks})
    return found


@dataclass(frozen=True)
class Paired:
    """B minus A, prompt by prompt."""

    difference: Interval
    better: int
    """Prompts on which B is better."""
    worse: int
    equal: int


def paired(first: Floats, second: Floats) -> Paired:
    """Compare two float[P] over the same prompts in the same order."""
    difference = second - first
    better, worse = int((difference > 0).sum()), int((difference < 0).sum())
    return Paired(estimate(difference, DIFFERENCE), better, worse, len(difference) - better - worse)
