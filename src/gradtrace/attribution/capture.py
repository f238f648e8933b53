"""One capture: the factors that a single backward pass delivers, sorted by response."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradtrace.attribution.errors import AttributionError
from gradtrace.attribution.layout import Layout
from gradtrace.attribution.modules import Block, Site


@dataclass(eq=False)
class Part:
    """The factors of one call of one module: U [rows, k_out], V [rows, k_in]."""

    u: Tensor
    v: Tensor
    positions: Tensor | None
    """long[rows]: the flat position of each row; None when the module saw every position, in order."""

    def rows_of(self, flat: Tensor, total: int) -> Tensor:
        """Rows of these flat positions (any shape); −1 for −1 and for what the module did not see."""
        if self.positions is None:
            return flat
        lookup = torch.full((total + 1,), -1, dtype=torch.long)  # the last entry answers for −1
        lookup[self.positions] = torch.arange(len(self.positions))
        return lookup[flat]


@dataclass(eq=False)
class Capture:
    layout: Layout
    positions: dict[str, Tensor]
    """Modules that see only some positions (an output head on the response alone): name → flat positions."""
    parts: dict[Block, list[Part]] = field(default_factory=dict)

    def add(self, block: Block, site: Site, u: Tensor, v: Tensor) -> None:
        positions = self._positions_seen(site, u)
        u, v = u.reshape(-1, u.shape[-1]), v.reshape(-1, v.shape[-1])
        if self.layout.scale != 1.0:
            u = u * self.layout.scale
        self.parts.setdefault(block, []).append(Part(u, v, positions))

    def _positions_seen(self, site: Site, u: Tensor) -> Tensor | None:
        batch, length = self.layout.shape
        rows = u.shape[:-1].numel()
        if site.name in self.positions:
            positions = self.positions[site.name].cpu()
            if len(positions) != rows:
                raise AttributionError(
                    f"{site.name} ran on {rows} positions, but positions[{site.name!r}] lists {len(positions)}"
                )
            return positions
        if rows == batch * length:
            return None
        if u.dim() == 3 and u.shape[0] == batch and u.shape[1] < length:
            # transformers' `logits_to_keep`: the head ran on the last positions of each row.
            last = torch.arange(length - u.shape[1], length)
            return (torch.arange(batch)[:, None] * length + last).reshape(-1)
        raise AttributionError(
            f"{site.name} ran on {list(u.shape[:-1])} positions, but this capture describes {batch} × {length}:"
            " response and tokens must be those of the batch that is going backward. If this module sees only"
            f" some positions, pass positions={{{site.name!r}: long[…]}} to capture()"
        )

    def gradients(self, block: Block, responses: list[int]) -> Tensor:
        """[n, k_out, k_in]: per response Σ u vᵀ over all its positions, its prompt's included."""
        parts = [self._gradients_of(part, responses) for part in self.parts[block]]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def _gradients_of(self, part: Part, responses: list[int]) -> Tensor:
        if self.layout.row_response is None or part.positions is not None:
            total = self.layout.response.numel()
            products = []
            for response in responses:
                rows = part.rows_of(self.layout.positions_of(response), total)
                rows = rows[rows >= 0]
                products.append(part.u[rows].T @ part.v[rows])
            return torch.stack(products)
        batch, length = self.layout.shape
        u, v = part.u.view(batch, length, -1), part.v.view(batch, length, -1)
        rows = self.layout.rows_of(responses)
        if len(rows) != batch or not torch.equal(rows, torch.arange(batch)):
            u, v = u[rows], v[rows]
        return torch.bmm(u.transpose(1, 2), v)

    def tokens(self, block: Block, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Factors at the flat positions [S, T] (−1 = none, gives zeros): u [S, P, T, k_out], v [S, P, T, k_in] for
        the P calls of the module."""
        us, vs = [], []
        for part in self.parts[block]:
            rows = part.rows_of(flat, self.layout.response.numel())
            missing = rows < 0
            u, v = part.u[rows.clamp(min=0)], part.v[rows.clamp(min=0)]
            if bool(missing.any()):
                u = u.masked_fill(missing[..., None].to(u.device), 0.0)
                v = v.masked_fill(missing[..., None].to(v.device), 0.0)
            us.append(u)
            vs.append(v)
        return torch.stack(us, 1), torch.stack(vs, 1)
