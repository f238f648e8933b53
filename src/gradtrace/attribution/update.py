"""What one `optimizer.step()` would do to the parameters, without doing it, in parts that add up.

    Δθ = − factor ⊙ gradient  +  momentum  +  decay

For Adam the factor is lr·(1−β₁)/(1−β₁ᵗ) / (√v̂ + ε), with the second moment already advanced by this gradient: given
that preconditioner, the first moment is linear in the gradient, so Δθ splits exactly into what this batch brings, what
earlier batches left in the first moment, and weight decay. For SGD the factor is a number. Adam's relatives differ in
the denominator, or in how they weigh the first moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradtrace.attribution.errors import AttributionError
from gradtrace.attribution.geometry import Source, advanced, effective_gradient, plain_moment, unwrapped


@dataclass(frozen=True, eq=False)
class ParameterUpdate:
    """The parts of Δθ of one parameter, each of its shape, or a number that stands for a constant tensor. They are of
    the state and the weights when they are asked for: ask before the step."""

    factor: Tensor | float
    """This batch's part of Δθ is −factor ⊙ gradient."""
    momentum_of: Callable[[], Tensor | float]
    decay_of: Callable[[], Tensor | float]

    @property
    def momentum(self) -> Tensor | float:
        """Computed when asked for: the scores of a step need `factor` alone, of all weights."""
        return self.momentum_of()

    @property
    def decay(self) -> Tensor | float:
        return self.decay_of()

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


def step_direction(
    model: nn.Module, optimizer: Any, gradient: Mapping[str, Tensor], of: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """What this gradient, or the part `of` it, contributes to the coming step: pairs of a parameter's name and a tensor
    that is sharded as it is. One by one, so that no second copy of all weights exists."""
    part = gradient if of is None else of
    for name, update in parameter_updates(optimizer, dict(model.named_parameters()), gradient):
        if name in part:
            yield name, (update.factor * part[name]).neg_()


def other_direction(model: nn.Module, optimizer: Any, gradient: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The rest of the coming step: momentum of earlier batches and weight decay."""
    for name, update in parameter_updates(optimizer, dict(model.named_parameters()), gradient):
        yield name, torch.zeros_like(gradient[name]) + (update.momentum + update.decay)


def learning_rate(optimizer: Any) -> float:
    """The largest of its groups; 0 in the first step of a warm-up: no weight moves."""
    return max(float(group["lr"]) for group in unwrapped(optimizer).param_groups)


Rule = Callable[[dict[str, Any], Mapping[str, Any], Tensor, Tensor], ParameterUpdate]
"""(group, state, parameter, gradient) → its update."""


def update_rule(optimizer: torch.optim.Optimizer) -> Rule:
    """An error that lists the known optimizers, if this is none of them."""
    for known, (rule, _) in RULES.items():
        if isinstance(optimizer, known):
            return rule
    kind, state = type(optimizer).__name__, next(iter(optimizer.state.values()), dict[str, Any]())
    why = ""
    if "8bit" in kind.lower() or "state2" in state:
        why = (
            ". It keeps its second moment in 8 bits, and small values, by which gradients are divided, are rounded away"
        )
    elif "muon" in kind.lower():
        why = ". It makes the update of a weight orthogonal, so that no token has a part of its own in it"
    names = ", ".join(sorted(["AdamW", *(one.__name__ for one in RULES)]))
    raise AttributionError(f"the step of {kind} is not known; those of torch's {names} are{why}")


def second_moment_source(model: nn.Module, optimizer: torch.optim.Optimizer, gradient: Mapping[str, Tensor]) -> Source:
    """Where the coming step has its second moment from. `batch_gradient`: the state of a parameter is empty, and its
    step is like the gradient's sign."""
    optimizer = unwrapped(optimizer)
    update_rule(optimizer)
    key = next(key for kind, (_, key) in RULES.items() if isinstance(optimizer, kind))
    if not key:
        return "none"
    parameters = dict(model.named_parameters())
    states = [optimizer.state.get(parameters[name], {}) for name in gradient]
    empty = any(key not in state or not float(state.get("step", 1)) for state in states)
    if empty and isinstance(optimizer, torch.optim.RAdam):  # whose first steps divide by nothing
        return "none"
    return "batch_gradient" if empty else "state_with_batch"


def _adam(group: dict[str, Any], state: Mapping[str, Any], parameter: Tensor, gradient: Tensor) -> ParameterUpdate:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    step = float(state.get("step", 0)) + 1
    square = _second_moment(group, state, parameter, gradient, beta2)
    if group["amsgrad"]:
        square = torch.maximum(square, _moment(state, "max_exp_avg_sq", parameter))
    denominator = square.sqrt_().div_((1 - beta2**step) ** 0.5).add_(float(group["eps"]))
    scale = denominator.reciprocal_().mul_(float(group["lr"]) * (1 - beta1) / (1 - beta1**step))

    def momentum() -> Tensor:
        return -beta1 / (1 - beta1) * scale * _moment(state, "exp_avg", parameter)

    return _averaged(group, parameter, scale, momentum)


def _nadam(group: dict[str, Any], state: Mapping[str, Any], parameter: Tensor, gradient: Tensor) -> ParameterUpdate:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    step, rate = float(state.get("step", 0)) + 1, float(group["lr"])
    now, following = (beta1 * (1 - 0.5 * 0.96 ** (at * float(group["momentum_decay"]))) for at in (step, step + 1))
    product = float(state.get("mu_product", 1.0)) * now
    square = _second_moment(group, state, parameter, gradient, beta2)
    denominator = (square / (1 - beta2**step)).sqrt() + float(group["eps"])
    ahead = rate * following / (1 - product * following) / denominator
    factor = rate * (1 - now) / (1 - product) / denominator + (1 - beta1) * ahead
    return _averaged(group, parameter, factor, lambda: -beta1 * ahead * _moment(state, "exp_avg", parameter))


def _radam(group: dict[str, Any], state: Mapping[str, Any], parameter: Tensor, gradient: Tensor) -> ParameterUpdate:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    step = float(state.get("step", 0)) + 1
    scale: Tensor | float = float(group["lr"]) / (1 - beta1**step)
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * step * beta2**step / (1 - beta2**step)
    if length > 5.0:
        square = _second_moment(group, state, parameter, gradient, beta2)
        shrunk = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        scale = scale * (shrunk * (1 - beta2**step)) ** 0.5 / (square.sqrt() + float(group["eps"]))
    return _averaged(
        group, parameter, (1 - beta1) * scale, lambda: -beta1 * scale * _moment(state, "exp_avg", parameter)
    )


def _adamax(group: dict[str, Any], state: Mapping[str, Any], parameter: Tensor, gradient: Tensor) -> ParameterUpdate:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    step = float(state.get("step", 0)) + 1
    largest = _moment(state, "exp_inf", parameter) * beta2
    largest = torch.maximum(largest, effective_gradient(group, parameter, gradient).abs() + float(group["eps"]))
    scale = float(group["lr"]) / (1 - beta1**step) / largest
    return _averaged(
        group, parameter, (1 - beta1) * scale, lambda: -beta1 * scale * _moment(state, "exp_avg", parameter)
    )


def _adagrad(group: dict[str, Any], state: Mapping[str, Any], parameter: Tensor, gradient: Tensor) -> ParameterUpdate:
    square = _moment(state, "sum", parameter) + effective_gradient(group, parameter, gradient).square()
    rate = float(group["lr"]) / (1 + float(state.get("step", 0)) * float(group["lr_decay"]))
    return _averaged(group, parameter, rate / (square.sqrt() + float(group["eps"])))


def _rmsprop(group: dict[str, Any], state: Mapping[str, Any], parameter: Tensor, gradient: Tensor) -> ParameterUpdate:
    alpha, momentum = float(group["alpha"]), float(group["momentum"])
    effective = effective_gradient(group, parameter, gradient)
    square = alpha * _moment(state, "square_avg", parameter) + (1 - alpha) * effective.square()
    if group["centered"]:
        mean = alpha * _moment(state, "grad_avg", parameter) + (1 - alpha) * effective
        square = square - mean.square()
    scale = float(group["lr"]) / (square.sqrt() + float(group["eps"]))
    kept = float(group["lr"]) * momentum
    return _averaged(
        group, parameter, scale, lambda: -kept * _moment(state, "momentum_buffer", parameter) if momentum else 0.0
    )


def _averaged(
    group: Mapping[str, Any],
    parameter: Tensor,
    factor: Tensor | float,
    momentum: Callable[[], Tensor | float] = lambda: 0.0,
) -> ParameterUpdate:
    """An update by `factor` of the gradient, and by what a first moment holds of earlier ones."""
    decay = float(group["weight_decay"])
    rate = float(group["lr"]) if group.get("decoupled_weight_decay") else factor
    return ParameterUpdate(
        factor=-factor if group.get("maximize") else factor,
        momentum_of=momentum,
        decay_of=lambda: -rate * decay * parameter.detach() if decay else 0.0,
    )


def _second_moment(
    group: Mapping[str, Any], state: Mapping[str, Any], parameter: Tensor, gradient: Tensor, beta: float
) -> Tensor:
    """As this step will see it, before its bias is corrected."""
    return advanced(plain_moment(state, "exp_avg_sq"), effective_gradient(group, parameter, gradient), beta)


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
        momentum_of=lambda: -rate * earlier,
        decay_of=lambda: -rate * weight * decay * parameter.detach() if decay else 0.0,
    )


def _moment(state: Mapping[str, Any], key: str, parameter: Tensor) -> Tensor:
    """A moment in the parameter's precision; zero before the first step."""
    found = plain_moment(state, key)
    return torch.zeros_like(parameter) if found is None else found.to(parameter.dtype)


RULES: dict[type[torch.optim.Optimizer], tuple[Rule, str]] = {
    torch.optim.Adam: (_adam, "exp_avg_sq"),  # AdamW is one
    torch.optim.NAdam: (_nadam, "exp_avg_sq"),
    torch.optim.RAdam: (_radam, "exp_avg_sq"),
    torch.optim.Adamax: (_adamax, "exp_inf"),
    torch.optim.Adagrad: (_adagrad, "sum"),
    torch.optim.RMSprop: (_rmsprop, "square_avg"),
    torch.optim.SGD: (_sgd, ""),
}
"""The known optimizers, and under which name each keeps what it divides by."""
