"""Norm and sketch of every response's own gradient, from the backward pass that training makes anyway.

Inside the hook of a layer a response's gradient M_r = Σ_t u_t v_tᵀ is formed, measured, projected to a few numbers and
dropped again: about one more weight-gradient product, and never the gradients of all responses at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gradtrace.attribution.capture import Capture
from gradtrace.attribution.config import InfluenceConfig
from gradtrace.attribution.factors import FactorHooks, sides
from gradtrace.attribution.layout import Layout
from gradtrace.attribution.modules import Block, Site, select_blocks
from gradtrace.attribution.projection import rademacher

LARGEST_STACK = 2**25
"""Numbers in the response gradients of one layer that are formed at once."""


class ResponseGradients:
    """Covers the linear layers that traces cover: the output head, which is often tied to the embedding, is left out.

    `sketch_dim` bounds either side of a layer's sketch. Inner products of sketches are unbiased estimates of those of
    the gradients, and exact where no side is longer than that.
    """

    def __init__(self, model: nn.Module, sketch_dim: int) -> None:
        chosen = select_blocks(model, InfluenceConfig(projection_dim_factor=0, credit="position"))
        self.blocks = [block for block in chosen if len(block.sites) == 1]
        self.sketch_dim = sketch_dim
        self._hooks = FactorHooks(self.blocks, self._receive)
        self._open: Capture | None = None
        self._squares: dict[int, Tensor] = {}
        self._sketches: dict[int, dict[str, Tensor]] = {}

    @contextmanager
    def capture(
        self, *, response: Tensor, tokens: Tensor, positions: Mapping[str, Tensor] | None = None
    ) -> Iterator[None]:
        """As `InfluenceTracer.capture`: the backward pass inside belongs to these rows."""
        self._open = Capture(Layout.of(response, tokens), dict(positions or {}))
        try:
            yield
        finally:
            self._open = None
            self._hooks.forget_calls()

    @torch.no_grad()
    def _receive(self, block: Block, site: Site, gradient: Tensor, x: Tensor) -> None:
        capture = self._open
        if capture is None:
            return
        with torch.autocast(gradient.device.type, enabled=False):
            gradient, x, positions = capture.wanted(site, gradient, x)
            capture.add(block, *sides(block, site, gradient, x), positions)
            at_once = max(1, LARGEST_STACK // (block.d_out * block.d_in))
            responses = capture.layout.responses
            for start in range(0, len(responses), at_once):
                some = responses[start : start + at_once]
                self._keep(block, some, capture.gradients(block, some))
            del capture.parts[block]

    def _keep(self, block: Block, responses: list[int], gradients: Tensor) -> None:
        squares = gradients.double().square().sum((1, 2)).cpu()
        sketches = self._projected(block, "out", gradients.transpose(1, 2))
        sketches = self._projected(block, "in", sketches.transpose(1, 2)).flatten(1).cpu()
        for response, square, sketch in zip(responses, squares, sketches, strict=True):
            self._squares[response] = self._squares.get(response, torch.zeros(())).double() + square
            self._sketches.setdefault(response, {})[block.name] = sketch

    def _projected(self, block: Block, side: str, values: Tensor) -> Tensor:
        """The last dimension projected to at most `sketch_dim`."""
        size = values.shape[-1]
        if size <= self.sketch_dim:
            return values
        return (
            values @ rademacher(block.name, side, self.sketch_dim, size, 0, values.dtype).to(values.device).T
        )

    def take(self) -> tuple[dict[int, float], dict[int, Tensor]]:
        """(‖g_r‖, sketch of g_r) of every response since the last call."""
        norms = {response: float(square.sqrt()) for response, square in self._squares.items()}
        order = [block.name for block in self.blocks]
        sketches = {
            response: torch.cat([parts[name] for name in order if name in parts])
            for response, parts in self._sketches.items()
        }
        self._squares, self._sketches = {}, {}
        return norms, sketches

    def attach(self) -> None:
        self._hooks.attach()

    def close(self) -> None:
        self._hooks.close()
