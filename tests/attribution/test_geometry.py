"""What the optimizer does to a gradient, against what its `step()` really does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradtrace.attribution import AttributionError, Factored, Geometry

SHAPE = (5, 4)


def stepped(make: Any, steps: int, seed: int = 0) -> tuple[nn.Parameter, Any]:
    """A parameter after some real steps, and its optimizer."""
    generator = torch.Generator().manual_seed(seed)
    parameter = nn.Parameter(torch.randn(SHAPE, generator=generator, dtype=torch.float64))
    optimizer = make([parameter])
    for _ in range(steps):
        parameter.grad = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
        optimizer.step()
    parameter.grad = None
    return parameter, optimizer


def real_effect(parameter: nn.Parameter, optimizer: Any, gradient: Tensor) -> Tensor:
    """What a step with this gradient does."""
    before = parameter.detach().clone()
    parameter.grad = gradient.clone()
    optimizer.step()
    return parameter.detach() - before


ADAMS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.0, 0.9)),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.0, 0.8), eps=1e-3, weight_decay=0.0),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.0, 0.9), weight_decay=0.0, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.0, 0.5), amsgrad=True),
}


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("kind", ADAMS)
def test_preconditioned_gradient_is_the_coming_step(kind: str, steps: int) -> None:
    """Without momentum Adam's step is −lr · P g, with v̂ as this very gradient leaves it."""
    parameter, optimizer = stepped(ADAMS[kind], steps)
    gradient = torch.randn(SHAPE, dtype=torch.float64)
    geometry = Geometry(optimizer)
    assert geometry.source(parameter, gradient) == ("state_with_batch" if steps else "batch_gradient")
    ours = geometry.preconditioned({"w": parameter}, {"w": gradient}, coming={"w": gradient})["w"]
    assert torch.allclose(real_effect(parameter, optimizer, gradient), -0.01 * ours, atol=1e-12)


def test_weight_decay_inside_the_gradient_is_part_of_the_coming_moment() -> None:
    parameter, optimizer = stepped(lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.0, 0.9), weight_decay=0.1), 3)
    gradient = torch.randn(SHAPE, dtype=torch.float64)
    effective = gradient + 0.1 * parameter.detach()
    denominator = Geometry(optimizer).denominator(parameter, gradient)
    assert torch.allclose(real_effect(parameter, optimizer, gradient), -0.01 * effective / denominator, atol=1e-12)


def test_state_before_the_step_is_bias_corrected() -> None:
    parameter, optimizer = stepped(ADAMS["adam"], 2)
    state = optimizer.state[parameter]
    geometry = Geometry(optimizer)
    assert geometry.source(parameter) == "state_before"
    assert torch.equal(geometry.second_moment(parameter), state["exp_avg_sq"] / (1 - 0.9**2))


def test_reading_the_geometry_changes_no_state() -> None:
    parameter, optimizer = stepped(ADAMS["amsgrad"], 2)
    before = {key: value.clone() for key, value in optimizer.state[parameter].items()}
    geometry = Geometry(optimizer)
    geometry.denominator(parameter)
    geometry.denominator(parameter, torch.randn(SHAPE, dtype=torch.float64))
    assert all(torch.equal(value, before[key]) for key, value in optimizer.state[parameter].items())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_leaves_a_gradient_as_it_is(momentum: float) -> None:
    parameter, optimizer = stepped(lambda p: torch.optim.SGD(p, lr=0.1, momentum=momentum), 2)
    geometry, gradient = Geometry(optimizer), torch.randn(SHAPE, dtype=torch.float64)
    assert geometry.source(parameter, gradient) == "none"
    assert geometry.preconditioned({"w": parameter}, {"w": gradient})["w"] is gradient


def test_every_parameter_group_has_its_own_numbers() -> None:
    first, second = (nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(2))
    optimizer = torch.optim.AdamW(
        [
            {"params": [first], "betas": (0.9, 0.5), "eps": 1.0},
            {"params": [second], "betas": (0.9, 0.9), "eps": 2.0},
        ]
    )
    for parameter in (first, second):
        parameter.grad = torch.full((2,), 3.0, dtype=torch.float64)
    optimizer.step()
    geometry, coming = Geometry(optimizer), torch.full((2,), 1.0, dtype=torch.float64)
    # v̂ after gradients 3 and 1: (β·9 + 1) (1−β) / (1−β²) = (9β + 1) / (1 + β)
    for parameter, beta, epsilon in ((first, 0.5, 1.0), (second, 0.9, 2.0)):
        expected = ((9 * beta + 1) / (1 + beta)) ** 0.5 + epsilon
        assert torch.allclose(geometry.denominator(parameter, coming), torch.full((2,), expected, dtype=torch.float64))


def test_a_parameter_that_never_had_a_gradient_is_left_out() -> None:
    parameter, optimizer = stepped(ADAMS["adam"], 1)
    idle = nn.Parameter(torch.zeros(2))
    optimizer.add_param_group({"params": [idle]})
    gradients = {"w": torch.ones(SHAPE), "idle": torch.ones(2)}
    assert set(Geometry(optimizer).preconditioned({"w": parameter, "idle": idle}, gradients)) == {"w"}


def test_before_the_first_step_there_is_nothing_to_go_by() -> None:
    parameter, optimizer = stepped(ADAMS["adam"], 0)
    geometry, gradient = Geometry(optimizer), torch.ones(SHAPE)
    assert geometry.second_moment(parameter) is None and geometry.source(parameter) == "none"
    assert geometry.preconditioned({"w": parameter}, {"w": gradient})["w"] is gradient


class Wrapper:
    """As accelerate wraps an optimizer: it has a `state` of its own kind."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.accelerator_state = None

    @property
    def state(self) -> Any:
        return self.optimizer.state


def test_wrapped_optimizers_are_unwrapped() -> None:
    _, optimizer = stepped(ADAMS["adam"], 1)
    assert Geometry(Wrapper(Wrapper(optimizer))).optimizer is optimizer


def eight_bit() -> Any:
    parameter, optimizer = stepped(ADAMS["adam"], 1)
    optimizer.state[parameter] = {
        "step": 1,
        "state1": torch.zeros(1),
        "state2": torch.zeros(20, dtype=torch.uint8),
    }
    return optimizer


@pytest.mark.parametrize(
    "make, message",
    [
        (eight_bit, "8 bits"),
        (lambda: stepped(lambda p: torch.optim.RMSprop(p), 1)[1], "RMSprop"),
        (lambda: stepped(lambda p: torch.optim.Adagrad(p), 0)[1], "Adagrad"),
        (lambda: stepped(lambda p: torch.optim.Adamax(p), 0)[1], "Adamax"),
        (lambda: object(), "no optimizer"),
    ],
)
def test_unknown_optimizers_are_refused_with_a_way_out(make: Any, message: str) -> None:
    with pytest.raises(AttributionError, match=message) as refused:
        Geometry(make())
    assert "hessian_mode=identity" in str(refused.value)


def test_a_parameter_of_another_model_is_refused() -> None:
    _, optimizer = stepped(ADAMS["adam"], 1)
    with pytest.raises(AttributionError, match="another model"):
        Geometry(optimizer).second_moment(nn.Parameter(torch.zeros(3)))


def test_factored_form_is_exact_for_a_second_moment_of_rank_one() -> None:
    rows, columns = torch.rand(5, dtype=torch.float64) + 0.1, torch.rand(4, dtype=torch.float64) + 0.1
    denominator = torch.outer(rows, columns)
    assert torch.allclose(Factored.of(denominator).preconditioner(), 1 / denominator, rtol=1e-12)


def test_factored_form_of_zeros_and_infinities() -> None:
    assert bool(torch.isfinite(Factored.of(torch.full((2, 3), 1e-8)).preconditioner()).all())
    with pytest.raises(AttributionError, match="not finite"):
        Factored.of(torch.tensor([[torch.inf, 1.0]]))
