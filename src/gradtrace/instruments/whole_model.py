"""What a host offers whose process holds the whole model: forward mode for derivatives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gradtrace.attribution import AttributionError, directional_derivative
from gradtrace.attribution.collectives import Ranks, forget_gathered, local
from gradtrace.instruments.contract import Backward, Gradient, Pass, Rows
from gradtrace.policy.padding_row import padding_row_is_constant
from gradtrace.rollout.sampler import evaluation_mode


class WholeModel:
    """The part of `contract.Host` that needs no batch. Derivatives have no step size to choose."""

    is_exact = True

    def __init__(self, model: nn.Module, ranks: Ranks | None = None) -> None:
        self.model = model
        self.ranks = ranks or Ranks()

    def derivative(
        self, run: Callable[[], Tensor], direction: Mapping[str, Tensor], step: float = 1.0, rate: float | None = None
    ) -> Tensor:
        with self.ranks.together():
            return directional_derivative(self.model, run, direction)

    def values(self, rows: Rows, of: Callable[[Pass], Tensor], as_kept: bool = False) -> Tensor:
        raise NotImplementedError

    def keep(self, backward: Backward) -> AbstractContextManager[Any]:
        return nullcontext()

    def kept_values(self, rows: Rows, of: Callable[[Pass], Tensor]) -> Tensor:
        return self.values(rows, of)

    def noted_probabilities(self, rows: Rows, places: Sequence[int]) -> AbstractContextManager[Tensor | None]:
        return nullcontext()

    def padding_held(self) -> AbstractContextManager[Any]:
        return padding_row_is_constant(self.model)

    def aside(self) -> AbstractContextManager[Any]:
        return evaluation_mode(self.model)

    @contextmanager
    def moved(self, direction: Gradient | Iterable[tuple[str, Tensor]], scale: float = 1.0) -> Iterator[None]:
        parameters, before = dict(self.model.named_parameters()), []
        pairs = direction.items() if isinstance(direction, Mapping) else direction
        try:
            with torch.no_grad():
                for name, step in pairs:
                    weight = local(parameters[name].detach())
                    if weight.dtype not in (torch.float32, torch.float64):
                        raise AttributionError(f"{name} is {weight.dtype}, which rounds away what one step changes")
                    before.append((weight, weight.clone()))
                    weight.add_(local(step).to(weight.dtype), alpha=scale)
            forget_gathered(self.model)
            yield
        finally:
            with torch.no_grad():
                for weight, values in before:
                    weight.copy_(values)
            forget_gathered(self.model)
