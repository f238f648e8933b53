"""The optimizer's state in a checkpoint of transformers' Trainer, and so of TRL: optimizer.pt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gradtrace.errors import GradtraceError
from gradtrace.policy.optimizer import Optimizer

FOREIGN = "optimizer.pt"
KEPT = ("step", "exp_avg", "exp_avg_sq")


def load_foreign_state(optimizer: Optimizer, model: Any, file: Path) -> None:
    """Moments, step counts, betas, ε and learning rate of Adam's state in `file`, for the parameters of `model`.

    The file numbers parameters in the order in which the Trainer groups them: those with weight decay, then the others.
    """
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        states = [saved["state"][number] for number in numbers]
        settings = {key: saved["param_groups"][0][key] for key in ("betas", "eps", "lr")}
        tensors = [{key: torch.as_tensor(state[key]) for key in KEPT} for state in states]
    except Exception as error:  # not a file of torch, or the state of another optimizer
        raise _unread(file, f"it holds no state of Adam: {type(error).__name__} {error}") from error
    names = _trainer_order(model)
    if len(names) != len(tensors):
        raise _unread(file, f"it has {len(tensors)} parameters, the model {len(names)} trainable ones")
    for name, state in zip(names, tensors, strict=True):
        if state["exp_avg_sq"].shape != optimizer.parameters[name].shape:
            found, wanted = list(state["exp_avg_sq"].shape), list(optimizer.parameters[name].shape)
            raise _unread(file, f"it has a parameter {found} in the place of {name} {wanted}")
    optimizer.load_state_tensors(
        {f"{key}/{name}": value for name, state in zip(names, tensors, strict=True) for key, value in state.items()}
    )
    for group in optimizer.adamw.param_groups:
        group.update(settings)


def _trainer_order(model: Any) -> list[str]:
    from transformers import Trainer

    with_decay = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return sorted(trainable, key=lambda name: name not in with_decay)


def _unread(file: Path, why: str) -> GradtraceError:
    return GradtraceError(
        f"{file} cannot be read as the state of this model's optimizer: {why}. Move it away to go on without"
    )
