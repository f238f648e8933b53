"""Aggregation by hand, and that any split into micro-batches adds up."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradtrace.algorithms import AGGREGATIONS, Denominator, aggregate, soft_overlong_penalty, token_weights
from gradtrace.errors import GradtraceError

MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
VALUES = torch.tensor([[1.0, 2.0, 6.0], [5.0, 9.0, 9.0], [9.0, 9.0, 9.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", (1 + 2 + 6 + 5) / 4),
        ("sequence_mean", (9 / 3 + 5) / 2),  # the row without tokens is not a sequence
        ("fixed_length", 14 / (2 * 10)),
    ],
)
def test_aggregate_by_hand(mode: str, expected: float) -> None:
    result = aggregate(VALUES, MASK, mode, Denominator.of(MASK, max_length=10))
    assert result.item() == pytest.approx(expected, rel=1e-14)


def test_the_default_is_the_token_mean_of_what_is_given() -> None:
    assert aggregate(VALUES, MASK).item() == pytest.approx(3.5)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_token_weights_undo_the_aggregation(mode: str) -> None:
    denominator = Denominator.of(MASK, max_length=10)
    weights = token_weights(MASK, mode, denominator, torch.float64)
    assert (weights[~MASK] == 0).all()
    torch.testing.assert_close((VALUES * weights).sum(), aggregate(VALUES, MASK, mode, denominator))


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_a_batch_without_tokens_is_zero_and_not_nan(mode: str) -> None:
    mask = torch.zeros(2, 3, dtype=torch.bool)
    values = torch.full((2, 3), math.nan, requires_grad=True)
    loss = aggregate(values, mask, mode, Denominator.of(mask, max_length=4))
    loss.backward()
    assert loss.item() == 0
    assert (values.grad == 0).all()


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=9),
    cuts=st.sets(st.integers(1, 8)),
    mode=st.sampled_from(AGGREGATIONS),
    seed=st.integers(0, 2**31),
)
def test_any_split_sums_to_the_whole(lengths: list[int], cuts: set[int], mode: str, seed: int) -> None:
    mask = torch.arange(6) < torch.tensor(lengths).unsqueeze(-1)
    values = torch.randn(mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    values = values.masked_fill(~mask, math.nan).requires_grad_()
    denominator = Denominator.of(mask, max_length=6)
    whole = aggregate(values, mask, mode, denominator)
    whole_gradient = torch.autograd.grad(whole, values)[0]
    edges = [0, *sorted(cut for cut in cuts if cut < len(lengths)), len(lengths)]
    parts = []
    for start, end in itertools.pairwise(edges):
        # a micro-batch is trimmed to its own longest row, as RolloutBatch.select does
        longest = max(lengths[start:end])
        piece = slice(start, end), slice(0, longest)
        parts.append(aggregate(values[piece], mask[piece], mode, denominator))
    torch.testing.assert_close(torch.stack(parts).sum(), whole, rtol=1e-12, atol=1e-14)
    split_gradient = torch.autograd.grad(torch.stack(parts).sum(), values)[0]
    torch.testing.assert_close(split_gradient, whole_gradient, rtol=1e-14, atol=0)


def test_denominators_of_ranks_add_up() -> None:
    whole = Denominator.of(MASK, max_length=7)
    assert Denominator.of(MASK[:1], max_length=7) + Denominator.of(MASK[1:], max_length=7) == whole
    with pytest.raises(ValueError, match="length limits differ"):
        whole + Denominator.of(MASK, max_length=8)


def test_fixed_length_without_a_length_limit_says_so() -> None:
    with pytest.raises(GradtraceError, match="give the Denominator a max_length"):
        aggregate(VALUES, MASK, "fixed_length")


def test_an_unknown_aggregation_names_the_nearest() -> None:
    with pytest.raises(GradtraceError, match="did you mean 'token_mean'"):
        aggregate(VALUES, MASK, "token-mean")


def test_soft_overlong_penalty_by_hand() -> None:
    # limit 100, buffer 20: free up to 80, then (length − 80)/20, full at 100 and not more beyond
    lengths = torch.tensor([1, 80, 85, 95, 100, 130])
    penalty = soft_overlong_penalty(lengths, max_length=100, buffer=20, penalty=2.0)
    torch.testing.assert_close(penalty, torch.tensor([0, 0, -0.5, -1.5, -2.0, -2.0]))


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_an_impossible_overlong_buffer_is_an_error(buffer: int) -> None:
    with pytest.raises(GradtraceError, match="overlong buffer"):
        soft_overlong_penalty(torch.tensor([5]), max_length=100, buffer=buffer)
