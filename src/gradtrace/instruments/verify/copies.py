"""Working copies of a model and its optimizer, precise enough to see what the step of one token does."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradtrace.errors import GradtraceError
from gradtrace.instruments.verify.real_steps import Original

SMALL_MODEL = 50_000_000
"""Parameters below which a copy in float64 costs little."""
OF_A_DEVICE = ("params", "fused", "foreach", "capturable", "decoupled_weight_decay")
"""Keys of a parameter group that a copy does not take over."""


def working_copy(
    model: nn.Module, optimizer: torch.optim.Optimizer, precision: str = "auto"
) -> tuple[nn.Module, torch.optim.Optimizer, Original | None]:
    """Model and optimizer to take steps with, and what they were copied from; None where they are the given ones.

    `precision`: float32, float64, or auto, which is float64 for small models. Weights in half precision are copied
    into at least float32: one step moves most of them by less than they can hold."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps the one that steps
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    check(trained, optimizer)
    small = sum(p.numel() for p in trained.values()) < SMALL_MODEL
    wanted = torch.float64 if precision == "float64" or (precision == "auto" and small) else torch.float32
    if {p.dtype for p in trained.values()} <= {wanted, torch.float64}:
        return model, optimizer, None
    own = copy.deepcopy(model).to(wanted)
    names = {p: name for name, p in trained.items()}
    made = optimizer_like(
        type(optimizer),
        own,
        optimizer.param_groups,
        [[names[p] for p in group["params"] if p in names] for group in optimizer.param_groups],
        {name: optimizer.state.get(p, {}) for name, p in trained.items()},
    )
    return own, made, (model, optimizer)


def check(trained: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Refuse weights and states that cannot be stepped and put back."""
    if not trained:
        raise GradtraceError("every parameter of the model is frozen (requires_grad=False): no step can move it")
    for name, p in trained.items():
        if hasattr(p, "device_mesh") or p.is_meta:
            raise GradtraceError(
                f"{name} is a shard of a weight: verify needs all of it in one process. Save a checkpoint and run "
                "`gradtrace verify CHECKPOINT`"
            )
    known = {p for group in optimizer.param_groups for p in group["params"]}
    if unknown := [name for name, p in trained.items() if p not in known]:
        raise GradtraceError(
            f"the optimizer does not know {unknown[0]} ({len(unknown)} such): give the one that trains this model"
        )
    for p, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != p.shape:
                raise GradtraceError(
                    f"{type(optimizer).__name__} keeps {key} as {tuple(value.shape)} for a parameter of "
                    f"{tuple(p.shape)} (quantised or factored): verify knows optimizers whose state has the shape of "
                    "their parameters"
                )


def optimizer_like(
    kind: type[torch.optim.Optimizer],
    model: nn.Module,
    groups: list[dict[str, Any]],
    names: list[list[str]],
    state: Mapping[str, Mapping[str, Any]],
) -> torch.optim.Optimizer:
    """An optimizer for a copy of a model in another precision, with the groups and the state of the original's."""
    parameters = dict(model.named_parameters())
    made = [
        {**{k: v for k, v in group.items() if k not in OF_A_DEVICE}, "params": [parameters[n] for n in some]}
        for group, some in zip(groups, names, strict=True)
        if some
    ]
    optimizer = kind(made)  # type: ignore[call-arg]
    for name, found in state.items():
        p = parameters[name]
        if found:
            optimizer.state[p] = {key: in_precision(value, p) for key, value in found.items()}
    return optimizer


def in_precision(value: Any, parameter: Tensor) -> Any:
    """A value of the optimizer's state, a copy in the precision of its parameter; counts stay as they are."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().to(parameter.dtype if value.dim() else value.dtype)
