"""Per-turn advantages: by exact enumeration of a two-turn problem their gradient is that of the expected return."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradtrace.algorithms import AdvantageInputs, advantage
from gradtrace.algorithms.advantages.turn_rloo import turns_by_mask
from gradtrace.errors import GradtraceError

COST = 0.3
# Turn 1: answer (0), ask tool A (1) or tool B (2). After a call, turn 2 answers 0 or 1; states differ by the tool.
REWARDS = {(0,): 0.4, (1, 0): 1.0, (1, 1): 0.0, (2, 0): 0.1, (2, 1): 0.7}


def log_prob(path: tuple[int, ...], theta: Tensor) -> list[Tensor]:
    """Of each turn's action; theta: 3 logits of turn 1, then 2 for each of the two later states."""
    found = [theta[:3].log_softmax(0)[path[0]]]
    if path[0]:
        found.append(theta[1 + 2 * path[0] : 3 + 2 * path[0]].log_softmax(0)[path[1]])
    return found


def inputs_of(paths: tuple[tuple[int, ...], ...]) -> AdvantageInputs:
    mask = torch.tensor([[True, False, len(path) == 2] for path in paths])
    rewards = torch.tensor([REWARDS[path] for path in paths], dtype=torch.float64)
    return AdvantageInputs(rewards, torch.zeros(len(paths), dtype=torch.long), mask)


def expected_gradient(theta: Tensor, weigh: Callable[[AdvantageInputs], Tensor], n: int = 3) -> Tensor:
    """E over all groups of n responses of Σ A ∇log π, divided by n."""
    total = torch.zeros_like(theta)
    for paths in itertools.product(REWARDS, repeat=n):
        terms = [log_prob(path, theta) for path in paths]
        chance = torch.stack([sum(own) for own in terms]).sum().exp().detach()
        weights = weigh(inputs_of(paths))[:, ::2]  # the columns of the two turns
        value = sum(weights[i, k] * term for i, own in enumerate(terms) for k, term in enumerate(own))
        total += chance * torch.autograd.grad(value, theta)[0]
    return total / n


@pytest.fixture
def theta() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()


def true_gradient(theta: Tensor, cost: float) -> Tensor:
    value = sum(
        sum(log_prob(path, theta)).exp() * (reward - cost * (len(path) - 1)) for path, reward in REWARDS.items()
    )
    return torch.autograd.grad(value, theta)[0]


@pytest.mark.parametrize("cost", [0.0, COST])
def test_the_gradient_is_unbiased(theta: Tensor, cost: float) -> None:
    estimator = advantage("turn_rloo", turn_cost=cost)
    found = expected_gradient(theta, lambda inputs: estimator(inputs).advantages)
    torch.testing.assert_close(found, true_gradient(theta, cost), rtol=1e-10, atol=1e-12)


def test_turns_of_different_states_as_one_group_point_elsewhere(theta: Tensor) -> None:
    """The known mistake: the responses that came to turn k compared with one another, as GRPO does with siblings."""

    def by_turn(inputs: AdvantageInputs) -> Tensor:
        found = torch.zeros(inputs.mask.shape, dtype=torch.float64)
        for column in (0, 2):
            there = inputs.mask[:, column]
            if there.any():
                found[there, column] = inputs.rewards[there] - inputs.rewards[there].mean()
        return found

    found, true = expected_gradient(theta, by_turn), true_gradient(theta, 0.0)
    assert torch.cosine_similarity(found, true, dim=0) < 0.99
    right = expected_gradient(theta, lambda inputs: advantage("turn_rloo")(inputs).advantages)
    assert torch.cosine_similarity(right, true, dim=0) > 1 - 1e-12


def test_only_turns_that_could_avoid_a_call_pay_for_it() -> None:
    inputs = inputs_of(((1, 0), (0,)))
    found = advantage("turn_rloo", turn_cost=COST)(inputs).advantages
    expected = [[1.0 - COST - 0.4, 0.0, 1.0 - 0.4], [0.4 - (1.0 - COST), 0.0, 0.0]]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_without_a_cost_it_is_rloo() -> None:
    inputs = inputs_of(((1, 0), (0,), (2, 1), (2, 0)))
    torch.testing.assert_close(advantage("turn_rloo")(inputs).advantages, advantage("rloo")(inputs).advantages)


def test_turns_by_mask_and_wrong_costs() -> None:
    mask = torch.tensor([[True, True, False, True], [False, True, False, False]])
    assert turns_by_mask(mask)[mask].tolist() == [0, 0, 1, 0]
    with pytest.raises(GradtraceError, match="turn_cost=-1"):
        advantage("turn_rloo", turn_cost=-1)(inputs_of(((0,), (0,))))
