"""KL estimators: values by hand; expected values and gradients by summing over a small vocabulary exactly."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gradtrace.algorithms import KL_ESTIMATORS, entropy_bonus, kl_estimate
from gradtrace.errors import GradtraceError

ONE = torch.ones(1, 1, dtype=torch.bool)


def at(difference: float, estimator: str) -> tuple[float, float]:
    """Value and gradient by log π of one token with this log π − log π_ref."""
    ref = torch.tensor([[-2.0]], dtype=torch.float64)
    log_probs = (ref + difference).requires_grad_()
    value = kl_estimate(log_probs, ref, ONE, estimator)
    return value.item(), torch.autograd.grad(value.sum(), log_probs)[0].item()


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        # d = log 4: k1 = d with gradient 1; k2 = d²/2 with gradient d; k3 = 1/4 + d − 1 with gradient 1 − 1/4
        ("k1", math.log(4), 1.0),
        ("k2", math.log(4) ** 2 / 2, math.log(4)),
        ("k3", math.log(4) - 0.75, 0.75),
        ("k1+", math.log(4), math.log(4)),
        ("k3+", math.log(4) - 0.75, math.log(4)),
    ],
)
def test_kl_by_hand(estimator: str, value: float, gradient: float) -> None:
    assert at(math.log(4), estimator) == pytest.approx((value, gradient), rel=1e-12)


def exact(estimator: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(E[estimate], KL(π‖ref), E[∇estimate], ∇KL(π‖ref), ∇KL(ref‖π)) over a vocabulary of six, by logits."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, dtype=torch.float64, generator=generator).requires_grad_()
    ref = torch.randn(6, dtype=torch.float64, generator=generator).log_softmax(-1)
    log_p = logits.log_softmax(-1)
    mask = torch.ones(1, 6, dtype=torch.bool)
    # tokens are drawn from π, so every token's estimate and gradient counts with weight π, held constant
    expected = (log_p.exp().detach() * kl_estimate(log_p[None], ref[None], mask, estimator)).sum()
    kl = (log_p.exp() * (log_p - ref)).sum()
    reverse = (ref.exp() * (ref - log_p)).sum()
    gradients = (torch.autograd.grad(f, logits, retain_graph=True)[0] for f in (expected, kl, reverse))
    return (expected.detach(), kl.detach(), *gradients)


@pytest.mark.parametrize("estimator", ["k1", "k3", "k1+", "k3+"])
def test_expected_value_is_the_kl(estimator: str) -> None:
    expected, kl, *_ = exact(estimator)
    torch.testing.assert_close(expected, kl)


@pytest.mark.parametrize("estimator", ["k2", "k1+", "k3+"])
def test_expected_gradient_is_that_of_the_kl(estimator: str) -> None:
    _, _, gradient, kl_gradient, _ = exact(estimator)
    torch.testing.assert_close(gradient, kl_gradient)


def test_naive_k1_has_no_expected_gradient_and_naive_k3_that_of_the_other_direction() -> None:
    _, _, k1_gradient, _, _ = exact("k1")
    torch.testing.assert_close(k1_gradient, torch.zeros_like(k1_gradient))
    _, _, k3_gradient, kl_gradient, reverse_gradient = exact("k3")
    torch.testing.assert_close(k3_gradient, reverse_gradient)
    assert (k3_gradient - kl_gradient).abs().max() > 0.01


def test_k3_keeps_its_digits_close_to_the_reference_in_float32() -> None:
    # e^−d + d − 1 ≈ d²/2 = 5e-9 at d = 1e-4; computed naively in float32 the answer is lost in rounding at 1e-7.
    ref = torch.zeros(1, 1)
    assert kl_estimate(ref + 1e-4, ref, ONE, "k3").item() == pytest.approx(5e-9, rel=0.03)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_kl_padding_and_reference_get_no_gradient(estimator: str) -> None:
    mask = torch.tensor([[True, False]])
    log_probs = torch.tensor([[-1.0, math.nan]], requires_grad=True)
    ref = torch.tensor([[-2.0, math.nan]], requires_grad=True)
    kl = kl_estimate(log_probs, ref, mask, estimator)
    kl.sum().backward()
    assert kl[0, 1] == 0
    assert log_probs.grad[0, 0] > 0
    assert log_probs.grad[0, 1] == 0
    assert ref.grad is None


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("difference", [-500.0, 500.0])
def test_kl_stays_finite_far_from_the_reference(estimator: str, difference: float) -> None:
    ref = torch.zeros(1, 1)
    assert torch.isfinite(kl_estimate(ref + difference, ref, ONE, estimator)).all()


def test_an_unknown_estimator_names_the_nearest() -> None:
    with pytest.raises(GradtraceError, match="did you mean 'k3'"):
        kl_estimate(torch.zeros(1, 1), torch.zeros(1, 1), ONE, "k33")


def test_entropy_bonus_lowers_the_loss_of_an_undecided_policy() -> None:
    entropies = torch.tensor([[2.0, math.nan]], requires_grad=True)
    loss = entropy_bonus(entropies, torch.tensor([[True, False]]), 0.01)
    loss.sum().backward()
    torch.testing.assert_close(loss, torch.tensor([[-0.02, 0.0]]))
    torch.testing.assert_close(entropies.grad, torch.tensor([[-0.01, 0.0]]))
