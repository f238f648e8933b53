"""What a real `optimizer.step()` would do, without leaving anything behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Original = tuple[nn.Module, torch.optim.Optimizer]
"""The model and the optimizer that a working copy was made of."""


class RealSteps:
    """Takes steps of an optimizer from one state, again and again; all that it moves comes back bit by bit."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        grad_clip: float = 0.0,
        original: Original | None = None,
    ) -> None:
        """`grad_clip`: the norm to which gradients are clipped before a step, as training does; 0 = not at all.
        `original`: where weights and state come back from; without it they are kept, which takes a copy of them."""
        self.optimizer = optimizer
        self.grad_clip = grad_clip
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._gradients = {name: p.grad for name, p in self.parameters.items()}
        owner, owned_by = original or (model, optimizer)
        own = dict(owner.named_parameters())

        def kept(value: Any) -> Any:
            return value.detach().clone() if isinstance(value, Tensor) and original is None else value

        self._weights = {name: kept(own[name]) for name in self.parameters}
        self._state: dict[str, dict[str, Any]] = {
            name: {key: kept(value) for key, value in owned_by.state.get(own[name], {}).items()}
            for name in self.parameters
        }

    def effect(self, gradient: Mapping[str, Tensor], measure: Callable[[], Tensor]) -> Tensor:
        """`measure()` at the weights that a step with this gradient leads to, which is clipped in place; parameters it
        leaves out have a gradient of zero, so that momentum moves them as it would."""
        for name, p in self.parameters.items():
            found = gradient.get(name)
            p.grad = torch.zeros_like(p) if found is None else found.detach().to(p.dtype)
        if self.grad_clip:
            nn.utils.clip_grad_norm_(self.parameters.values(), self.grad_clip)
        try:
            self.optimizer.step()
            with torch.no_grad():
                return measure()
        finally:
            self.restore()

    @torch.no_grad()
    def restore(self) -> None:
        for name, p in self.parameters.items():
            p.grad = self._gradients[name]
            p.copy_(self._weights[name])
            if not self._state[name]:
                self.optimizer.state.pop(p, None)
                continue
            state = self.optimizer.state[p]
            for key, value in self._state[name].items():
                if isinstance(value, Tensor):
                    state[key].copy_(value)
                else:
                    state[key] = value
