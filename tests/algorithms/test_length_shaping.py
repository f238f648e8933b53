"""Length shaping prefers short right responses and never makes a wrong one the better."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradtrace.algorithms import cosine_shaping, shortest_shaping

LIMIT = 64


def shapings(lengths: Tensor, right: Tensor, strength: float) -> list[Tensor]:
    group = torch.zeros_like(lengths)
    return [
        cosine_shaping(lengths, right, LIMIT, strength),
        shortest_shaping(lengths, right, group, strength),
    ]


@given(
    st.lists(st.tuples(st.integers(0, LIMIT), st.booleans()), min_size=1, max_size=12),
    st.floats(0.01, 0.99),
)
def test_right_stays_above_wrong_and_shorter_right_is_never_worse(
    responses: list[tuple[int, bool]], strength: float
) -> None:
    lengths = torch.tensor([length for length, _ in responses])
    right = torch.tensor([is_right for _, is_right in responses])
    for shaping in shapings(lengths, right, strength):
        assert shaping.abs().max() <= strength + 1e-6
        rewards = right.float() + shaping
        assert not right.any() or right.all() or rewards[right].min() > rewards[~right].max()
        order = lengths[right].argsort(stable=True)
        assert (rewards[right][order].diff() <= 1e-6).all()


def test_cosine_at_its_ends() -> None:
    lengths = torch.tensor([0, LIMIT // 2, LIMIT, 2 * LIMIT])
    right = cosine_shaping(lengths, torch.ones(4, dtype=torch.bool), LIMIT, 0.5)
    wrong = cosine_shaping(lengths, torch.zeros(4, dtype=torch.bool), LIMIT, 0.5)
    assert torch.allclose(right, torch.tensor([0.0, -0.25, -0.5, -0.5]), atol=1e-6)
    assert torch.allclose(wrong, torch.tensor([-0.5, -0.25, 0.0, 0.0]), atol=1e-6)


def test_shortest_compares_within_the_group_alone() -> None:
    lengths = torch.tensor([10, 20, 30, 500, 500, 7])
    right = torch.tensor([True, True, False, True, False, True])
    group = torch.tensor([3, 3, 3, 8, 8, 1])
    shaping = shortest_shaping(lengths, right, group, 1.0)
    assert shaping.tolist() == [0.5, 0.0, -0.5, 0.0, 0.0, 0.0]
    assert shortest_shaping(lengths[:0], right[:0], group[:0], 1.0).tolist() == []


def test_wrong_responses_never_gain() -> None:
    lengths = torch.tensor([1, 30, 60])
    for shaping in shapings(lengths, torch.zeros(3, dtype=torch.bool), 0.5):
        assert (shaping <= 0).all()
