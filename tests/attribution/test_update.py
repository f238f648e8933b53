"""The parts of an optimizer's step against the step itself, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradtrace.attribution import AttributionError
from gradtrace.attribution.update import ParameterUpdate, parameter_updates, second_moment_source

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adam with decay": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.3),
    "adam uphill": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.3, maximize=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2, weight_decay=0.3),
    "nadamw": lambda p: torch.optim.NAdam(p, lr=1e-2, weight_decay=0.3, decoupled_weight_decay=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2, weight_decay=0.3),
    "radamw": lambda p: torch.optim.RAdam(p, lr=1e-2, weight_decay=0.3, decoupled_weight_decay=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2, weight_decay=0.3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.1, weight_decay=0.3, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, weight_decay=0.3),
    "rmsprop centred": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True, momentum=0.8, maximize=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.3),
}


def model_and(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(5, 4).double()
    return model, OPTIMIZERS[kind](model.parameters())


def with_gradient(model: nn.Module, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def updates(model: nn.Module, optimizer: Any, gradient: dict[str, Tensor]) -> dict[str, ParameterUpdate]:
    return dict(parameter_updates(optimizer, dict(model.named_parameters()), gradient))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_parts_add_up_to_a_real_step(kind: str) -> None:
    """From the first step on, past the one at which RAdam begins to divide."""
    model, optimizer = model_and(kind)
    for seed in range(9):
        gradient = with_gradient(model, seed)
        found = {name: update.whole(gradient[name]) for name, update in updates(model, optimizer, gradient).items()}
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.step()
        for name, parameter in model.named_parameters():
            expected = parameter.detach() - before[name]
            digits = 1e-6 if kind.startswith("nadam") else 1e-9  # torch keeps NAdam's products of betas in float32
            torch.testing.assert_close(found[name], expected, rtol=digits, atol=1e-14)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_momentum_is_what_a_step_without_a_new_gradient_would_do(kind: str) -> None:
    """With the same second moment: the parts of two opposite gradients tell what does not come from them."""
    model, optimizer = model_and(kind)
    if optimizer.param_groups[0]["weight_decay"]:
        optimizer.param_groups[0]["weight_decay"] = 0.0  # decay before the moments is in their squares
    if optimizer.param_groups[0].get("centered"):
        pytest.skip("its denominator knows the sign of the gradient")
    for seed in range(9):
        with_gradient(model, seed)
        optimizer.step()
    gradient = with_gradient(model, 99)
    opposite = {name: -g for name, g in gradient.items()}
    for name, update in updates(model, optimizer, gradient).items():
        other = updates(model, optimizer, opposite)[name]
        torch.testing.assert_close(torch.as_tensor(update.factor), torch.as_tensor(other.factor))
        both = update.whole(gradient[name]) + other.whole(opposite[name])
        torch.testing.assert_close(both, torch.zeros_like(both) + 2 * update.momentum)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_empty_state_is_told_from_a_full_one(kind: str) -> None:
    model, optimizer = model_and(kind)
    gradient = with_gradient(model, 0)
    none = kind == "sgd"
    first = "none" if none or kind.startswith("radam") else "batch_gradient"
    assert second_moment_source(model, optimizer, gradient) == first
    optimizer.step()
    assert second_moment_source(model, optimizer, gradient) == ("none" if none else "state_with_batch")


@pytest.mark.parametrize(
    ("name", "why"), [("Adam8bit", "in 8 bits"), ("Muon", "orthogonal"), ("Lion", "those of torch's")]
)
def test_an_unknown_optimizer_is_refused_with_the_known_ones_and_the_reason(name: str, why: str) -> None:
    model = nn.Linear(2, 2)
    kind = type(name, (torch.optim.Optimizer,), {})
    with pytest.raises(AttributionError, match=rf"{name} is not known; those of torch's Adagrad, .* are.*") as said:
        updates(model, kind(model.parameters(), {}), with_gradient(model, 0))
    assert why in str(said.value)


def test_a_state_that_is_a_code_is_refused() -> None:
    model, optimizer = model_and("adam")
    gradient = with_gradient(model, 0)
    optimizer.step()
    for state in optimizer.state.values():
        state["exp_avg_sq"] = state["exp_avg_sq"].to(torch.int8)
    with pytest.raises(AttributionError, match=r"keeps `exp_avg_sq` as a code .* plain state"):
        updates(model, optimizer, gradient)
