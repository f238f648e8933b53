"""Every interval that is printed covers the truth as often as it says."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gradtrace.intervals import (
    DIFFERENCE,
    SHARE,
    bounded_interval,
    mean_interval,
    t_quantile,
    welch_difference,
)

ROUNDS = 1500


@pytest.mark.parametrize(
    ("freedom", "level", "value"),
    [(1, 0.95, 12.7062), (2, 0.95, 4.30265), (30, 0.95, 2.04227), (1000, 0.95, 1.96234), (1e6, 0.95, 1.959964),
     (7, 0.9, 1.89458)],
)  # fmt: skip
def test_quantiles_of_students_t(freedom: float, level: float, value: float) -> None:
    assert t_quantile(freedom, level) == pytest.approx(value, rel=2e-6)


def test_between_whole_degrees_the_share_inside_is_the_level() -> None:
    """1.4 degrees: Student's t is a normal over the root of a mean square, with χ² of any degree."""
    generator = np.random.default_rng(0)
    drawn = generator.normal(size=400_000) / np.sqrt(generator.chisquare(1.4, 400_000) / 1.4)
    assert np.mean(np.abs(drawn) < t_quantile(1.4)) == pytest.approx(0.95, abs=0.0015)


@pytest.mark.parametrize("count", [3, 8, 30])
def test_means_of_few_values(count: int) -> None:
    samples = np.random.default_rng(1).normal(2.0, 3.0, (ROUNDS, count))
    found = [mean_interval(sample.tolist()) for sample in samples]
    assert np.mean([f.low <= 2.0 <= f.high for f in found]) == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize("count", [5, 30, 100])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 0.5, 0.98, 1.0])
def test_shares_near_their_bounds(count: int, share: float) -> None:
    drawn = np.random.default_rng(2).binomial(1, share, (ROUNDS, count)).astype(float)
    found = [bounded_interval(row.tolist(), SHARE) for row in drawn]
    assert np.mean([f.low <= share <= f.high for f in found]) >= 0.93
    assert all(0 <= f.low <= f.mean <= f.high <= 1 for f in found)


@pytest.mark.parametrize(("first", "second"), [(0.0, 0.0), (0.1, 0.05), (0.5, 0.6), (0.9, 0.99)])
def test_differences_of_shares_on_the_same_prompts(first: float, second: float) -> None:
    generator = np.random.default_rng(3)
    drawn = generator.binomial(1, second, (ROUNDS, 40)) - generator.binomial(1, first, (ROUNDS, 40))
    found = [bounded_interval(row.tolist(), DIFFERENCE) for row in drawn]
    assert np.mean([f.low <= second - first <= f.high for f in found]) >= 0.93


def test_responses_to_one_prompt_count_as_one() -> None:
    """Prompts differ in difficulty: the mean of four responses to each has the spread of prompts, not of responses."""
    generator = np.random.default_rng(4)
    chances = generator.beta(0.3, 0.6, (ROUNDS, 30))
    found = [bounded_interval((generator.binomial(4, row) / 4).tolist(), SHARE) for row in chances]
    assert np.mean([f.low <= 1 / 3 <= f.high for f in found]) >= 0.93


def test_samples_of_different_spread() -> None:
    generator = np.random.default_rng(5)
    pairs = [(generator.normal(1, 1, 4).tolist(), generator.normal(0, 5, 6).tolist()) for _ in range(ROUNDS)]
    found = [welch_difference(a, b) for a, b in pairs]
    assert np.mean([f.low <= 1.0 <= f.high for f in found]) == pytest.approx(0.95, abs=0.02)


def test_one_value_has_a_mean_and_no_interval() -> None:
    found = mean_interval([2.0])
    assert found.mean == 2.0 and math.isnan(found.half) and mean_interval([]).count == 0
