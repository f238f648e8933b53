"""What one `optimizer.step()` would do to the parameters, without doing it, in parts that add up.

    Δθ = − factor ⊙ gradient  +  momentum  +  decay

For Adam the factor is lr·(1−β₁)/(1−β₁ᵗ) / (√v̂ + ε), with the second moment already advanced by this gradient: given
that preconditioner, the first moment is linear in the gradient, so Δθ splits exactly into what this batch brings, what
earlier batches left in the first moment, and weight decay. For SGD the factor is a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradtrace.attribution.errors import AttributionError
from gradtrace.attribution.geometry import unwrapped


@dataclass(frozen=True, eq=False)
class ParameterUpdate:
    """The parts of Δθ of one parameter, each of its shape, or a number that stands for a constant tensor."""

    factor: Tensor | float
    """This batch's part of Δθ is −factor ⊙ gradient."""
    momentum: Tensor | float
    decay: Tensor | float

    def whole(self, gradient: Tensor) -> Tensor:
        return -self.factor * gradient + self.momentum + self.decay


def parameter_updates(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    gradient: Mapping[str, Tensor],
) -> Iterator[tuple[str, ParameterUpdate]]:
    """The update of every parameter that has a gradient (the optimizer passes over the others), from the actual
    state."""
    optimizer = unwrapped(optimizer)
    rule = update_rule(optimizer)
    names = {id(parameter): name for name, parameter in parameters.items()}
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is None:
                    raise AttributionError(
                        f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that the model has not: "
                        "was the optimizer made for another model?"
                    )
                if name in gradient:
                    yield name, rule(group, optimizer.state.get(parameter, {}), parameter, gradient[name])


def update_rule(optimizer: torch.optim.Optimizer) -> Any:
    """(group, state, parameter, gradient) → `ParameterUpdate`; an error if the optimizer is not known."""
    if isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        return _adam
    if isinstance(optimizer, torch.optim.SGD):
        return _sgd
    raise AttributionError(f"the update of torch's AdamW, Adam and SGD is known, not of {type(optimizer).__name__}")


def _adam(group: dict[str, Any], state: Mapping[str, Any], parameter: Tensor, gradient: Tensor) -> ParameterUpdate:
    rate, decay = float(group["lr"]), float(group["weight_decay"])
    beta1, beta2 = (float(beta) for beta in group["betas"])
    sign = -1.0 if group["maximize"] else 1.0
    decoupled = bool(group.get("decoupled_weight_decay", False))
    moment = _moment(state, "exp_avg", parameter)
    square = _moment(state, "exp_avg_sq", parameter)
    step = float(state.get("step", 0)) + 1

    effective = sign * gradient if decoupled or not decay else sign * gradient + decay * parameter
    square = beta2 * square + (1 - beta2) * effective * effective
    if group["amsgrad"]:
        square = torch.maximum(square, _moment(state, "max_exp_avg_sq", parameter))
    denominator = square.sqrt() / (1 - beta2**step) ** 0.5 + float(group["eps"])
    scale = rate / (1 - beta1**step) / denominator
    factor = (1 - beta1) * scale
    return ParameterUpdate(
        factor=sign * factor,
        momentum=-beta1 * scale * moment,
        decay=-rate * decay * parameter.detach() if decoupled else -factor * decay * parameter.detach(),
    )


def _sgd(group: dict[str, Any], state: Mapping[str, Any], parameter: Tensor, gradient: Tensor) -> ParameterUpdate:
    rate, decay, momentum = float(group["lr"]), float(group["weight_decay"]), float(group["momentum"])
    sign = -1.0 if group["maximize"] else 1.0
    buffer = state.get("momentum_buffer")
    weight = 1.0  # of this gradient in what is subtracted
    earlier: Tensor | float = 0.0
    if momentum:
        weight = 1.0 if buffer is None else 1.0 - float(group["dampening"])  # the first step is not dampened
        kept: Tensor | float = 0.0 if buffer is None else momentum * buffer.to(parameter.dtype)
        earlier = momentum * kept if group["nesterov"] else kept
        if group["nesterov"]:
            weight = 1.0 + momentum * weight
    return ParameterUpdate(
        factor=sign * rate * weight,
        momentum=-rate * earlier,
        decay=-rate * weight * decay * parameter.detach() if decay else 0.0,
    )


def _moment(state: Mapping[str, Any], key: str, parameter: Tensor) -> Tensor:
    """A moment in the parameter's precision; zero before the first step."""
    found = state.get(key)
    return torch.zeros_like(parameter) if found is None else found.to(parameter.dtype)
