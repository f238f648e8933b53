"""The probe's passes through a model in this process: forward mode for derivatives, autograd for gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradtrace.attribution import directional_derivative
from gradtrace.attribution.collectives import Ranks
from gradtrace.errors import GradtraceError
from gradtrace.instruments.entropy_probe.passes import Progress, TokenBatch
from gradtrace.instruments.host import Gradient
from gradtrace.instruments.padding_row import padding_row_is_constant
from gradtrace.rollout.sampler import evaluation_mode


@dataclass(eq=False)
class ModelProbeHost:
    """A `ProbeHost`. Derivatives have no step size to choose, and nothing cancels in them."""

    model: nn.Module
    ranks: Ranks = field(default_factory=Ranks)
    is_exact = True

    def still(self) -> AbstractContextManager[Any]:
        return evaluation_mode(self.model)

    def derivative(
        self, run: Callable[[], Tensor], direction: Mapping[str, Tensor], step: float = 1.0, rate: float | None = None
    ) -> Tensor:
        with self.ranks.together():
            return directional_derivative(self.model, run, direction)

    def entropy_gradient(self, batch: TokenBatch, weights: Tensor, progress: Progress | None = None) -> Gradient:
        def objective(rows: Tensor, values: Tensor) -> Tensor:
            log_probs, entropies = values
            own = weights[rows].repeat_interleave(batch.lengths[rows]).to(values)
            return (entropies + own * log_probs).sum()

        return gradient_of(self.model, batch, objective, progress)

    def padding_held(self) -> AbstractContextManager[Any]:
        return padding_row_is_constant(self.model)


def gradient_of(
    model: nn.Module,
    batch: TokenBatch,
    objective: Callable[[Tensor, Tensor], Tensor],
    progress: Progress | None = None,
) -> Gradient:
    """The gradient of `objective(rows, values)`, summed over the passes; parameters that it does not reach are left
    out."""
    found: Gradient = {}
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    done = 0
    for one in batch.passes():
        with torch.enable_grad():
            value = objective(one.rows, one.run())
        if not value.requires_grad:
            raise GradtraceError(
                "the loss does not depend on any trainable parameter: is the model run under no_grad, or are its "
                "outputs detached?"
            )
        gradients = torch.autograd.grad(value, list(trainable.values()), allow_unused=True)
        for name, gradient in zip(trainable, gradients, strict=True):
            if gradient is not None:
                found[name] = found[name].add_(gradient) if name in found else gradient.clone()
        done += len(one.rows)
        if progress is not None:
            progress(done, len(batch.lengths))
    if not found:
        raise GradtraceError("the loss does not reach any of the model's trainable parameters")
    return found
