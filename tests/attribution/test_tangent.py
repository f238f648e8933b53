"""Forward-mode derivatives against autograd."""

from __future__ import annotations

import pytest
import torch

from gradtrace.attribution import AttributionError, directional_derivative, tangent
from gradtrace.attribution.tangent import faster_method
from tests.attribution.models import FAMILIES, random_responses, tiny_model
from tests.attribution.reference import token_terms


def direction_for(model: torch.nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        for name, p in model.named_parameters()
    }


def brute_force(model: torch.nn.Module, values: torch.Tensor, direction: dict[str, torch.Tensor]) -> torch.Tensor:
    parameters = dict(model.named_parameters())
    result = []
    for value in values:
        gradients = torch.autograd.grad(value, [parameters[n] for n in direction], retain_graph=True, allow_unused=True)
        result.append(sum((g * direction[n]).sum() for n, g in zip(direction, gradients, strict=True) if g is not None))
    return torch.stack(result)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_jvp_equals_autograd_over_all_parameters(family: str, tied: bool) -> None:
    model, batch = tiny_model(family, tied), random_responses()
    direction = direction_for(model)
    ours = directional_derivative(model, lambda: token_terms(model, batch, 0), direction)
    theirs = brute_force(model, token_terms(model, batch, 0), direction)
    assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-7), (torch.float32, 2e-3)])
def test_finite_difference_equals_jvp_and_restores_every_bit(dtype: torch.dtype, tolerance: float) -> None:
    model, batch = tiny_model(), random_responses()
    model.to(dtype)
    # A gradient-like direction: that is what it is used along.
    terms = token_terms(model, batch, 1).sum()
    names = [name for name, _ in model.named_parameters()]
    direction = dict(zip(names, torch.autograd.grad(terms, list(model.parameters())), strict=True))
    before = {name: p.clone() for name, p in model.named_parameters()}
    exact = directional_derivative(model, lambda: token_terms(model, batch, 0), direction, "jvp")
    ours = directional_derivative(model, lambda: token_terms(model, batch, 0), direction, "finite_difference")
    assert float((ours - exact).norm() / exact.norm()) < tolerance
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])


def test_parameters_come_back_even_if_the_function_fails() -> None:
    model = tiny_model()
    before = [p.clone() for p in model.parameters()]

    def fails() -> torch.Tensor:
        raise ValueError("no")

    with pytest.raises(ValueError):
        directional_derivative(model, fails, direction_for(model), "finite_difference")
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_parameters_outside_the_direction_do_not_move() -> None:
    model, batch = tiny_model(), random_responses()
    some = {"lm_head.weight": direction_for(model)["lm_head.weight"]}
    ours = directional_derivative(model, lambda: token_terms(model, batch, 0), some)
    assert torch.allclose(ours, brute_force(model, token_terms(model, batch, 0), some), atol=1e-10)


def test_bf16_is_refused_for_finite_differences() -> None:
    model, batch = tiny_model(), random_responses()
    model.to(torch.bfloat16)
    with pytest.raises(AttributionError, match="bfloat16"):
        directional_derivative(model, lambda: token_terms(model, batch, 0), direction_for(model), "finite_difference")


@pytest.mark.parametrize(
    "direction, message",
    [
        ({}, "empty"),
        ({"no.such": torch.zeros(1)}, "does not have"),
        ({"lm_head.weight": torch.zeros(2, 2)}, r"\[2, 2\]"),
    ],
)
def test_a_wrong_direction_is_refused(direction: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(AttributionError, match=message):
        directional_derivative(tiny_model(), lambda: torch.zeros(1), direction)


def test_an_unknown_method_is_refused() -> None:
    model = tiny_model()
    with pytest.raises(AttributionError, match="finite_difference"):
        directional_derivative(model, lambda: torch.zeros(1), direction_for(model), "magic")  # type: ignore[arg-type]


def test_a_large_model_in_float32_takes_differences_and_others_forward_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model().float()
    assert faster_method(model) == "jvp"
    monkeypatch.setattr(tangent, "LARGE", 1000)
    assert faster_method(model) == "finite_difference"
    assert faster_method(model.double()) == "jvp"
