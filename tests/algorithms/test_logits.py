"""Log-probs and entropies from logits: values, gradients, forward mode, memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gradtrace.algorithms import entropy_from_logits, log_probs_and_entropies, log_probs_from_logits, logits


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of seven to a block, so that five rows take three blocks, the last one short."""
    monkeypatch.setattr(logits, "BLOCK_ELEMENTS_CPU", 15)


def example(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(*shape, 7, generator=generator, dtype=torch.float64).to(dtype)
    return values, torch.randint(0, 7, shape, generator=generator)


def plainly(values: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = (values / temperature).log_softmax(-1)
    return log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def test_log_prob_and_entropy_by_hand() -> None:
    # logits log 1, log 2, log 1: probabilities 1/4, 1/2, 1/4; H = 2·¼·log 4 + ½·log 2 = 1.5 log 2
    values = torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64).log()
    assert log_probs_from_logits(values, torch.tensor(1)).item() == pytest.approx(math.log(0.5))
    assert entropy_from_logits(values).item() == pytest.approx(1.5 * math.log(2))
    # at temperature 1/2 the weights are squared: 1/6, 4/6, 1/6
    assert log_probs_from_logits(values, torch.tensor(1), 0.5).item() == pytest.approx(math.log(4 / 6))


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (0,)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_those_of_log_softmax(shape: tuple[int, ...], temperature: float) -> None:
    values, tokens = example(*shape)
    ours, theirs = values.clone().requires_grad_(), values.clone().requires_grad_()
    actual = log_probs_and_entropies(ours, tokens, temperature)
    expected = plainly(theirs, tokens, temperature)
    weights = [torch.randn(shape, dtype=torch.float64) for _ in range(2)]
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)
    sum((a * w).sum() for a, w in zip(actual, weights, strict=True)).backward()
    sum((e * w).sum() for e, w in zip(expected, weights, strict=True)).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_reverse_forward_and_second_derivatives() -> None:
    values, tokens = example(5)
    values.requires_grad_()

    def both(z: Tensor) -> tuple[Tensor, Tensor]:
        return log_probs_and_entropies(z, tokens, 0.7)

    def log_probs(z: Tensor) -> Tensor:
        return log_probs_from_logits(z, tokens)

    for function in (both, log_probs):
        assert torch.autograd.gradcheck(function, values, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(function, values)


def test_torch_func_jvp_agrees_with_the_closed_form() -> None:
    # SCIENCE.md 6.8: ∇_z H = −p(log p + H), hence along Δz the entropy changes by −Cov_p(log p, Δz)
    values, _ = example(5)
    direction = torch.randn(5, 7, dtype=torch.float64)
    _, change = torch.func.jvp(entropy_from_logits, (values,), (direction,))
    p, log_p = values.softmax(-1), values.log_softmax(-1)
    covariance = (p * log_p * direction).sum(-1) - (p * log_p).sum(-1) * (p * direction).sum(-1)
    torch.testing.assert_close(change, -covariance)


def test_forbidden_tokens_have_probability_zero_and_no_nan() -> None:
    # top-k filtering writes −inf; 0 · −inf must not enter the entropy or its gradient
    values = torch.tensor([[1.0, 1.0, -math.inf, -math.inf]], requires_grad=True)
    log_probs, entropies = log_probs_and_entropies(values, torch.tensor([0]))
    torch.testing.assert_close(entropies, torch.tensor([math.log(2)]))
    (log_probs + entropies).sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([[0.5, -0.5, 0.0, 0.0]]))


@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_large_logits_do_not_overflow(shift: float) -> None:
    values, tokens = example(5, dtype=torch.float32)
    expected = log_probs_and_entropies(values, tokens)
    for actual, e in zip(log_probs_and_entropies(values + shift, tokens), expected, strict=True):
        torch.testing.assert_close(actual, e, rtol=1e-2, atol=1e-2)  # float32 keeps 1e-3 of a logit at 1e4


def test_half_precision_logits_give_float32_results_and_half_precision_gradients() -> None:
    values, tokens = example(5, dtype=torch.bfloat16)
    values.requires_grad_()
    log_probs, entropies = log_probs_and_entropies(values, tokens)
    expected = plainly(values.float(), tokens, 1.0)
    torch.testing.assert_close(log_probs, expected[0])
    torch.testing.assert_close(entropies, expected[1])
    log_probs.sum().backward()
    assert values.grad.dtype == torch.bfloat16


def test_no_copy_of_the_logits_is_kept_for_the_backward_pass() -> None:
    values, tokens = example(5)
    values.requires_grad_()
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        log_probs_and_entropies(values, tokens)
    large = [tensor for tensor in kept if tensor.numel() >= values.numel()]
    assert large, "the hook saw nothing: this test can no longer tell"
    assert all(tensor.data_ptr() == values.data_ptr() for tensor in large)


def test_tokens_of_another_shape_are_refused() -> None:
    values, _ = example(5)
    with pytest.raises(ValueError, match=r"tokens \(4,\) and logits \(5, 7\)"):
        log_probs_from_logits(values, torch.zeros(4, dtype=torch.long))
