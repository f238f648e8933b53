"""Selection rules and diagnosis: what is kept, why, and what a step says about its scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradtrace.errors import GradtraceError
from gradtrace.instruments.tracin import TracinConfig, TracinReason
from gradtrace.instruments.tracin.diagnosis import certain_share, diagnose, spread_interval
from gradtrace.instruments.tracin.rules import RULES, select

SCORES = torch.tensor([3.0, -1.0, 0.0, 2.0, -4.0, -2.0, float("nan"), 1.0], dtype=torch.float64)


def kept(rule: str, scores: torch.Tensor = SCORES, **options: float) -> list[int]:
    return select(scores, rule, TracinConfig(**options)).kept.nonzero().squeeze(-1).tolist()


def reasons(rule: str, **options: float) -> list[TracinReason]:
    return [TracinReason(value) for value in select(SCORES, rule, TracinConfig(**options)).reason.tolist()]


def test_positive_keeps_scores_above_zero_only() -> None:
    assert kept("positive") == [0, 3, 7]
    found = reasons("positive")
    assert found[0] is TracinReason.KEPT_POSITIVE and found[1] is TracinReason.DROPPED_NEGATIVE
    assert found[2] is TracinReason.DROPPED_ZERO and found[6] is TracinReason.DROPPED_NON_FINITE


def test_top_fraction_counts_scores_that_say_something() -> None:
    assert kept("top_fraction", top_fraction=0.5) == [0, 3, 7]  # of 6: neither the zero nor the NaN counts
    assert kept("top_fraction", top_fraction=0.01) == [0]  # never empty


def test_drop_lowest_drops_a_share_of_the_negative_ones_and_keeps_zeros() -> None:
    assert kept("drop_lowest", drop_share=1 / 3) == [0, 1, 2, 3, 5, 7]
    assert kept("drop_lowest", drop_share=1.0) == [0, 2, 3, 7]
    assert reasons("drop_lowest", drop_share=1.0)[2] is TracinReason.KEPT_ZERO


def test_none_keeps_all_that_is_finite() -> None:
    assert kept("none") == [0, 1, 2, 3, 4, 5, 7]


def test_too_few_positive_scores_fall_back_to_the_best_half_and_say_so() -> None:
    scores = -torch.arange(1.0, 21.0, dtype=torch.float64)
    scores[7] = 0.5  # 1 of 20: less than a tenth
    selected = select(scores, "positive")
    assert selected.fallback and "min_positive_ratio" in selected.note
    assert selected.kept.nonzero().squeeze(-1).tolist() == [*range(9), 9]
    assert not select(scores, "positive", TracinConfig(min_positive_ratio=0.05)).fallback


def test_the_fallback_counts_the_responses_that_the_chart_counts() -> None:
    """1 of 3 scores that say something is positive, but 1 of 12 of the batch: tracin/positive_ratio is 0.083."""
    scores = torch.tensor([1.0, -1.0, -2.0, *[0.0] * 9], dtype=torch.float64)
    selected = select(scores, "positive", TracinConfig(min_positive_ratio=0.1))
    assert selected.fallback and selected.note.startswith("8% of the scores are positive")
    assert not select(scores, "positive", TracinConfig(min_positive_ratio=0.08)).fallback


@pytest.mark.parametrize("rule", RULES)
def test_all_negative_scores_never_empty_the_update(rule: str) -> None:
    scores = torch.tensor([-1.0, -3.0, -2.0, -5.0], dtype=torch.float64)
    selected = select(scores, rule, TracinConfig(drop_share=1.0, top_fraction=0.25))
    assert bool(selected.kept.any())
    if rule == "drop_lowest":
        assert "would drop every response" in selected.note


@pytest.mark.parametrize("rule", RULES)
def test_zero_scores_say_nothing_so_everything_is_kept(rule: str) -> None:
    selected = select(torch.zeros(5, dtype=torch.float64), rule)
    assert selected.kept.all() and not selected.fallback
    assert set(selected.reason.tolist()) == {int(TracinReason.KEPT_NO_SIGNAL)}


def test_scores_without_a_finite_one_are_an_error_that_says_where_to_look() -> None:
    with pytest.raises(GradtraceError, match=r"none of the 3 TracIn scores is finite.*actor/grad_norm"):
        select(torch.full((3,), torch.nan), "positive")


def test_soft_weights_rise_with_the_score_and_have_mean_one() -> None:
    selected = select(SCORES, "soft")
    finite = torch.isfinite(SCORES)
    order = SCORES[finite].argsort()
    assert (selected.weight[finite][order].diff() > 0).all()
    assert float(selected.weight[finite].mean()) == pytest.approx(1)
    assert selected.weight[6] == 0
    cold = select(SCORES, "soft", TracinConfig(soft_temperature=1e-4)).weight
    assert cold[1] == cold[4] == 0 and cold[0] == cold[3] > 1


@given(
    st.lists(st.integers(-(10**6), 10**6), min_size=1, max_size=40),
    st.sampled_from(RULES),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_an_update_is_never_empty_and_scale_does_not_matter(
    values: list[int], rule: str, share: float, ratio: float
) -> None:
    scores = torch.tensor(values, dtype=torch.float64)
    options = TracinConfig(min_positive_ratio=ratio, fallback_fraction=share, top_fraction=share, drop_share=share)
    selected = select(scores, rule, options)
    assert bool(selected.kept.any())
    assert torch.equal(selected.kept, select(scores * 2.0**-20, rule, options).kept)
    assert torch.equal(selected.kept, selected.weight > 0) or rule == "soft"


# ---------------------------------------------------------------- diagnosis


def test_healthy_scores_raise_no_objection() -> None:
    scores = np.random.default_rng(0).normal(1.0, 1.0, 64)
    assert diagnose(scores, val_norm=1.0, train_norm=100.0, low=scores - 0.01, high=scores + 0.01) == []


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("validation gradient is zero", {"scores": np.zeros(9), "val_norm": 0.0}),
        ("Every score is zero", {"scores": np.zeros(9), "val_norm": 1.0}),
        ("of the scores are zero", {"scores": np.r_[np.zeros(95), 1.0, -1.0, 2.0], "val_norm": 1.0}),
        ("not finite", {"scores": np.array([1.0, np.nan, -1.0]), "val_norm": 1.0}),
        ("next to zero", {"scores": np.r_[1e-9, -1e-9, 2e-9], "val_norm": 1.0, "train_norm": 1.0}),
        ("nearly orthogonal", {"scores": np.r_[np.ones(8), -np.ones(8)], "val_norm": 10, "train_norm": 10}),
        ("skewed", {"scores": np.r_[100.0, np.ones(20), -np.ones(19)], "val_norm": 1.0}),
        ("are negative", {"scores": -np.linspace(1, 2, 30), "val_norm": 1.0}),
        (
            "too small",
            {
                "scores": np.r_[np.ones(8), -np.ones(8)],
                "val_norm": 1.0,
                "low": np.full(16, -3.0),
                "high": np.full(16, 3.0),
                "val_prompts": 16,
            },
        ),
    ],
)
def test_each_trouble_is_said_in_words(words: str, arguments: dict) -> None:
    found = diagnose(**arguments)
    assert len(found) == 1 and words in found[0], found


@pytest.mark.parametrize("count", [3, 8, 40])
def test_the_interval_covers_the_truth_as_often_as_it_says(count: int) -> None:
    """Scores are sums over parts of a validation set; 90 % intervals of 4,000 scores with a known mean."""
    parts = np.random.default_rng(1).normal(0.3, 1.0, (count, 4000))
    low, high = spread_interval(parts)
    covered = ((low <= count * 0.3) & (high >= count * 0.3)).mean()
    assert 0.885 <= covered <= 0.915


def test_one_part_has_no_interval() -> None:
    assert np.isnan(spread_interval(np.ones((1, 2)))[0]).all()


def test_certainty_counts_intervals_on_one_side_of_zero() -> None:
    scores = np.array([1.0, -1.0, 2.0, 0.0])
    low, high = np.array([0.5, -2.0, -1.0, 0.0]), np.array([2.0, -0.5, 3.0, 0.0])
    assert certain_share(scores, low, high) == pytest.approx(2 / 3)
