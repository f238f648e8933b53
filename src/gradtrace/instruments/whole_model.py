"""What a host offers whose process holds the whole model: forward mode for derivatives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from gradtrace.attribution import directional_derivative
from gradtrace.attribution.collectives import Ranks
from gradtrace.attribution.tangent import moved
from gradtrace.instruments.contract import Gradient
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

    def padding_held(self) -> AbstractContextManager[Any]:
        return padding_row_is_constant(self.model)

    def aside(self) -> AbstractContextManager[Any]:
        return evaluation_mode(self.model)

    @contextmanager
    def moved(self, direction: Gradient | Iterable[tuple[str, Tensor]], scale: float = 1.0) -> Iterator[None]:
        with moved(self.model, direction.items() if isinstance(direction, Mapping) else direction, scale):
            yield
