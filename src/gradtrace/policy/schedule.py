"""The learning rate as a function of the training step: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from gradtrace.config import OptimConfig


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """The rate of training step `step` (from 1): a linear warm-up, then constant, or down to min_lr_ratio · lr."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    end = config.schedule_steps or total_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, end - config.warmup_steps))
    share = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)
