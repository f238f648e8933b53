"""What Adam does to a gradient: it divides it, element by element, by √v̂ + ε; SGD leaves it as it is.

The influence of one gradient on another, per unit of learning rate, is therefore g · P h with P = diag(1 / (√v̂ + ε)).
v̂ is the bias-corrected second moment of the optimizer's state, or, where the gradient of the coming step is known,
the one that this step will see.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradtrace.attribution.collectives import gathered, on_mesh
from gradtrace.attribution.errors import AttributionError

Source = Literal["state_before", "state_with_batch", "batch_gradient", "none"]
"""Where v̂ came from: the optimizer's state; the state advanced by the coming gradient; the coming gradient alone,
before the first step; nowhere, and P = I (SGD, or nothing is known yet)."""
PLAIN: tuple[type[Tensor], ...] = (Tensor, nn.Parameter, DTensor)
"""Kinds of tensors whose numbers are what they stand for; a subclass may hold a code."""
INSTEAD = "use hessian_mode=identity, which knows no optimizer"


def unwrapped(optimizer: Any) -> Any:
    """The optimizer itself, from inside the wrappers of accelerate, TRL and schedulers."""
    while not hasattr(optimizer, "state") or hasattr(optimizer, "accelerator_state"):
        if not hasattr(optimizer, "optimizer"):
            raise AttributionError(f"{type(optimizer).__name__} is no optimizer: it has no state; {INSTEAD}")
        optimizer = optimizer.optimizer
    return optimizer


class Geometry:
    """Reads an optimizer's state, and never changes it. Without an optimizer P = I."""

    def __init__(self, optimizer: Any = None) -> None:
        self.optimizer = None if optimizer is None else unwrapped(optimizer)
        self.adaptive = self.optimizer is not None and is_adam(self.optimizer)
        """Whether P is anything but I."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        self._groups = {id(parameter): group for group in groups for parameter in group["params"]}

    @property
    def name(self) -> str:
        return "none" if self.optimizer is None else type(self.optimizer).__name__

    def holds(self, parameter: Tensor) -> bool:
        """Whether the optimizer moves this parameter."""
        return id(parameter) in self._groups

    def second_moment(self, parameter: Tensor, coming: Tensor | None = None) -> Tensor | None:
        """v̂ of one parameter, at least in float32 and sharded as the state is; None where nothing is known of it.

        With `coming`, the gradient that the next step will be given, v̂ is what that step will divide by.
        """
        if not self.adaptive:
            return None
        group, state = self._of(parameter)
        precise = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        moment, steps = plain_moment(state, "exp_avg_sq"), float(state.get("step", 0))
        if moment is None and coming is None:
            return None
        if coming is not None:
            gradient = effective_gradient(group, parameter.detach().to(precise), coming.detach().to(precise))
            moment, steps = advanced(moment, gradient, float(group["betas"][1])), steps + 1
        assert moment is not None
        if group.get("amsgrad") and "max_exp_avg_sq" in state:
            largest = state["max_exp_avg_sq"].to(precise)
            moment = largest if coming is None else torch.maximum(moment.to(precise), largest)
        return moment.to(precise) / (1 - float(group["betas"][1]) ** steps)

    def denominator(self, parameter: Tensor, coming: Tensor | None = None) -> Tensor | None:
        """√v̂ + ε; None where P = I."""
        moment = self.second_moment(parameter, coming)
        return None if moment is None else moment.sqrt_().add_(float(self._of(parameter)[0]["eps"]))

    def source(self, parameter: Tensor, coming: Tensor | None = None) -> Source:
        """Where `second_moment` of the same arguments takes v̂ from."""
        if not self.adaptive:
            return "none"
        known = "exp_avg_sq" in self._of(parameter)[1]
        if coming is None:
            return "state_before" if known else "none"
        return "state_with_batch" if known else "batch_gradient"

    def preconditioned(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        coming: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """P times a gradient that is given by parameter name, shard by shard where it is sharded.

        A parameter without a second moment has never had a gradient and no update has moved it, so it is left out; but
        if none has one, there is nothing to go by yet and the gradients come back as they are.
        """
        denominators = {name: self.denominator(parameters[name], (coming or {}).get(name)) for name in gradients}
        scaled = {name: gradients[name] / below for name, below in denominators.items() if below is not None}
        return scaled or dict(gradients)

    def _of(self, parameter: Tensor) -> tuple[dict[str, Any], Mapping[str, Any]]:
        assert self.optimizer is not None
        group = self._groups.get(id(parameter))
        if group is None:
            raise AttributionError(
                f"{self.name} does not hold a traced parameter of shape {list(parameter.shape)}: it was made for"
                f" another model, or it keeps flat partitions of the weights. Pass the right optimizer, or {INSTEAD}"
            )
        return group, self.optimizer.state.get(parameter, {})


@dataclass(frozen=True, eq=False)
class Factored:
    """P of a weight matrix as an outer product, P_ij ≈ rows_i² · columns_j²: then u ↦ rows·u, v ↦ columns·v is P^½."""

    rows: Tensor
    """[d_out]"""
    columns: Tensor
    """[d_in]"""

    @staticmethod
    def of(denominator: Tensor) -> Factored:
        """From √v̂ + ε [d_out, d_in]: its square is r cᵀ / mean to good approximation, r and c its row and column
        means. Of a sharded weight only the means travel."""
        squares = on_mesh(denominator).square()
        rows, columns = (gathered(squares.sum(side)) / squares.shape[side] for side in (1, 0))
        if not bool(torch.isfinite(rows.sum())):
            raise AttributionError("the optimizer's second moment is not finite")
        root = rows.mean().sqrt()
        tiny = torch.finfo(rows.dtype).tiny
        return Factored((rows / root).clamp(min=tiny) ** -0.25, (columns / root).clamp(min=tiny) ** -0.25)

    def preconditioner(self) -> Tensor:
        """[d_out, d_in]: P itself."""
        return torch.outer(self.rows.square(), self.columns.square())


# ---------------------------------------------------------------- the state of an optimizer


def is_adam(optimizer: Any) -> bool:
    """Whether it divides by √v̂ + ε; False for SGD, and an error that says what to do for every other one."""
    for state in list(optimizer.state.values())[:1]:
        if "state2" in state:
            raise AttributionError(
                f"{type(optimizer).__name__} keeps its second moment in 8 bits, and small values, by which gradients"
                f" are divided, are rounded away: use an optimizer with plain state, or {INSTEAD}"
            )
    if isinstance(optimizer, torch.optim.Adam | torch.optim.SGD):  # AdamW is an Adam
        return isinstance(optimizer, torch.optim.Adam)
    raise AttributionError(
        f"hessian_mode=optimizer knows torch's Adam, AdamW and SGD, and this is {type(optimizer).__name__}; {INSTEAD}"
    )


def plain_moment(state: Mapping[str, Any], key: str) -> Tensor | None:
    """A moment of the state; None before the first step. Quantised ones are refused."""
    found = state.get(key)
    if found is not None and (type(found) not in PLAIN or not found.is_floating_point()):
        raise AttributionError(
            f"the optimizer keeps `{key}` as a code ({type(found).__name__}, {found.dtype}), and its small values are"
            f" rounded away: use an optimizer with plain state, or {INSTEAD}"
        )
    return found


def effective_gradient(group: Mapping[str, Any], parameter: Tensor, gradient: Tensor) -> Tensor:
    """What moments are taken of: the gradient to go down, with weight decay in it where that is not decoupled."""
    gradient, decay = -gradient if group.get("maximize") else gradient, float(group["weight_decay"])
    return gradient if not decay or group.get("decoupled_weight_decay") else gradient + decay * parameter


def advanced(moment: Tensor | None, gradient: Tensor, beta: float) -> Tensor:
    """The running mean of squares, with this gradient in it."""
    if moment is None:
        return (1 - beta) * gradient * gradient
    return (beta * moment.to(gradient.dtype)).addcmul_(gradient, gradient, value=1 - beta)


# ---------------------------------------------------------------- the gradient that it will be given


def coming_gradients(
    parameters: Mapping[str, Tensor], coming: Mapping[str, Tensor] | Literal[True] | None
) -> Mapping[str, Tensor]:
    """The gradients that the optimizer will be given next, by name: as they are, or (True) those in `.grad`."""
    if coming is not True:
        return coming or {}
    return {name: p.grad for name, p in parameters.items() if p.grad is not None}


class ClippedGradients(Mapping[str, Tensor]):
    """The gradients that stand in `.grad`, as the optimizer will be given them after clipping to `max_norm` (0 or None:
    no clipping). They are scaled one at a time, when asked for, so that no second copy of all of them exists."""

    def __init__(self, model: nn.Module, max_norm: float | None) -> None:
        self._gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        self.factor = 1.0
        """What clipping multiplies them by."""
        if max_norm and self._gradients:
            norm = gathered(torch.nn.utils.get_total_norm(list(self._gradients.values())))
            self.factor = min(1.0, max_norm / (float(norm) + 1e-6))  # as clip_grad_norm_ does

    def __getitem__(self, name: str) -> Tensor:
        return self._gradients[name] * self.factor

    def __iter__(self) -> Iterator[str]:
        return iter(self._gradients)

    def __len__(self) -> int:
        return len(self._gradients)
