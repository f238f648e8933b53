"""AdamW that clips, refuses non-finite gradients, and whose state is plain named tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from gradtrace.errors import GradtraceError
from gradtrace.policy.settings import OptimConfig


class Optimizer:
    def __init__(self, parameters: dict[str, nn.Parameter], config: OptimConfig, total_steps: int) -> None:
        """`total_steps`: training steps of the run, the horizon of the schedule."""
        if not parameters:
            raise GradtraceError("The model has no trainable parameters: every weight is frozen.")
        self.parameters = parameters
        self.config = config
        self.total_steps = total_steps
        self.clip_factor = 1.0
        """What the last `clip` multiplied the gradients by."""
        matrices = [p for p in parameters.values() if p.dim() >= 2]
        others = [p for p in parameters.values() if p.dim() < 2]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def begin_step(self, step: int) -> float:
        """Set the learning rate of training step `step`."""
        rate = learning_rate(self.config, step, self.total_steps)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        return rate

    def clip(self) -> float:
        """The norm of the gradients, clipped afterwards to config.grad_clip."""
        limit = self.config.grad_clip or math.inf
        norm = float(nn.utils.clip_grad_norm_(self.parameters.values(), limit))
        self.clip_factor = min(1.0, limit / (norm + 1e-6))
        return norm

    def step(self) -> None:
        self.adamw.step()

    def zero_grad(self) -> None:
        self.adamw.zero_grad()

    def state_tensors(self) -> dict[str, Tensor]:
        """Adam's moments and step counts as `exp_avg/NAME` …; empty before the first step."""
        return {
            f"{key}/{name}": value.detach().cpu().contiguous()
            for name, parameter in self.parameters.items()
            for key, value in self.adamw.state.get(parameter, {}).items()
        }

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        for label, tensor in tensors.items():
            key, name = label.split("/", 1)
            if name not in self.parameters or (tensor.dim() and tensor.shape != self.parameters[name].shape):
                raise GradtraceError(
                    f"The checkpoint's optimizer state has '{name}' {tuple(tensor.shape)}, which the model has not: "
                    "was model.path or model.lora changed?"
                )
            parameter = self.parameters[name]
            device = "cpu" if key == "step" and parameter.device.type == "cpu" else parameter.device
            self.adamw.state[parameter][key] = tensor.to(device)


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """The rate of training step `step` (from 1): a linear warm-up, then constant, or down to min_lr_ratio · lr. It
    depends on the step alone: there is nothing to save and nothing to restore."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    end = config.schedule_steps or total_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, end - config.warmup_steps))
    share = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)
