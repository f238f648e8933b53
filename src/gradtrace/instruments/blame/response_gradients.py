"""Norm and sketch of every response's own gradient, from the backward pass that training makes anyway.

For M_r = Σ_t u_t v_tᵀ of a layer, ‖M_r‖² = Σ_{t,s} (u_t·u_s)(v_t·v_s) needs no M_r where responses are short, and the
sketch P M_r Qᵀ = Σ_t (P u_t)(Q v_t)ᵀ never does. Both are taken inside the layer's hook.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gradtrace.attribution.config import InfluenceConfig
from gradtrace.attribution.factors.capture import Capture, Layout, Part
from gradtrace.attribution.factors.layers import (
    Block,
    FactorHooks,
    Site,
    full_precision,
    rademacher,
    select_blocks,
    sides,
)

LARGEST_STACK = 2**25
"""Numbers in the matrices of one layer that are formed at once."""


class ResponseGradients:
    """Covers the linear layers that traces cover: the output head, which is often tied to the embedding, is left out.

    `sketch_dim` bounds either side of a layer's sketch. Inner products of sketches are unbiased estimates of those of
    the gradients, and exact where no side is longer than that.
    """

    def __init__(self, model: nn.Module, sketch_dim: int) -> None:
        chosen = select_blocks(model, InfluenceConfig(credit="position"))
        self.blocks = [block for block in chosen if len(block.sites) == 1]
        self.sketch_dim = sketch_dim
        self._hooks = FactorHooks(self.blocks, self._receive)
        self._open: Capture | None = None
        self._projections: dict[tuple[str, str, torch.dtype, torch.device], Tensor] = {}
        self._found: dict[Block, list[tuple[list[int], Tensor, Tensor]]] = {}
        """(responses, ‖M_r‖², sketches) of the layer's calls."""

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
        with full_precision(gradient.device.type):
            gradient, x, positions = capture.wanted(site, gradient, x)
            capture.add(block, *sides(block, site, gradient, x), positions)
            part = capture.parts.pop(block)[0]
            for responses, u, v in _stacks(capture.layout, part):
                sketches = self._projected(block, "out", u).transpose(1, 2) @ self._projected(block, "in", v)
                found = (responses, _squared_norms(u, v).double(), sketches.flatten(1))
                self._found.setdefault(block, []).append(found)

    def _projected(self, block: Block, side: str, values: Tensor) -> Tensor:
        """The last dimension projected to at most `sketch_dim`."""
        size = values.shape[-1]
        if size <= self.sketch_dim:
            return values
        key = (block.name, side, values.dtype, values.device)
        if key not in self._projections:
            made = rademacher(block.name, side, self.sketch_dim, size, 0, values.dtype)
            self._projections[key] = made.T.contiguous().to(values.device)
        return values @ self._projections[key]

    def take(self) -> tuple[dict[int, float], dict[int, Tensor]]:
        """(‖g_r‖, sketch of g_r) of every response since the last call."""
        found, self._found = self._found, {}
        responses = sorted({r for parts in found.values() for some, _, _ in parts for r in some})
        place = {response: index for index, response in enumerate(responses)}
        norms: list[Tensor] = []
        columns: list[Tensor] = []
        for parts in (found[block] for block in self.blocks if block in found):
            norms.append(parts[0][1].new_zeros(len(responses)))
            columns.append(parts[0][2].new_zeros(len(responses), parts[0][2].shape[1]))
            for some, square, sketches in parts:
                index = torch.tensor([place[response] for response in some])
                norms[-1][index] = square
                columns[-1][index] = sketches
        if not columns:
            return {}, {}
        lengths = torch.stack(norms).sum(0).sqrt().tolist()
        return dict(zip(responses, lengths, strict=True)), dict(
            zip(responses, torch.cat(columns, 1).cpu(), strict=True)
        )

    def attach(self) -> None:
        self._hooks.attach()

    def close(self) -> None:
        self._hooks.close()


def _stacks(layout: Layout, part: Part) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """(responses, U [n, T, d_out], V [n, T, d_in]) of all responses, a few at a time; one at a time where rows are
    packed."""
    if layout.row_response is None or part.positions is not None:
        for response in layout.responses:
            rows = part.rows_of(layout.positions_of(response), layout.response.numel())
            rows = rows[rows >= 0].to(part.u.device)
            yield [response], part.u[rows][None], part.v[rows][None]
        return
    batch, length = layout.shape
    u, v = part.u.view(batch, length, -1), part.v.view(batch, length, -1)
    at_once = max(1, LARGEST_STACK // min(length * length, u.shape[-1] * v.shape[-1]))
    for start in range(0, len(layout.responses), at_once):
        some = layout.responses[start : start + at_once]
        chosen = layout.index_of(some, u.device)
        yield some, u[chosen], v[chosen]


def _squared_norms(u: Tensor, v: Tensor) -> Tensor:
    """[n]: ‖Σ_t u_t v_tᵀ‖², by products of positions or by the matrices, whichever is less work."""
    length, d_out, d_in = u.shape[1], u.shape[2], v.shape[2]
    if length * (d_out + d_in) < d_out * d_in:
        return ((u @ u.transpose(1, 2)) * (v @ v.transpose(1, 2))).sum((1, 2)).clamp(min=0)
    return (u.transpose(1, 2) @ v).square().sum((1, 2))
