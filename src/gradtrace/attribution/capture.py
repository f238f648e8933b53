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

    def find(self, flat: Tensor, total: int) -> tuple[Tensor, Tensor]:
        """(which of these flat positions this call saw, their rows), both long; `total` is B·S."""
        if self.positions is None:
            return torch.arange(len(flat)), flat
        lookup = torch.full((total,), -1, dtype=torch.long)
        lookup[self.positions] = torch.arange(len(self.positions))
        rows = lookup[flat]
        seen = (rows >= 0).nonzero().squeeze(-1)
        return seen, rows[seen]


@dataclass(eq=False)
class Capture:
    layout: Layout
    positions: dict[str, Tensor]
    """Modules that see only some positions (an output head on the response alone): name → long flat positions."""
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

    def gradient(self, block: Block, response: int) -> Tensor:
        """[k_out, k_in]: Σ over all positions of the response, its prompt's included, of u vᵀ."""
        total = self.layout.response.numel()
        flat = self.layout.positions_of(response)
        gradient = None
        for part in self.parts[block]:
            _, rows = part.find(flat, total)
            product = part.u[rows].T @ part.v[rows]
            gradient = product if gradient is None else gradient + product
        assert gradient is not None
        return gradient

    def gradients(self, block: Block, responses: list[int]) -> Tensor:
        """[n, k_out, k_in]."""
        parts = self.parts[block]
        if self.layout.row_response is None or any(part.positions is not None for part in parts):
            return torch.stack([self.gradient(block, response) for response in responses])
        batch, length = self.layout.shape
        row_of = {int(r): row for row, r in enumerate(self.layout.row_response.tolist())}
        rows = torch.tensor([row_of[response] for response in responses])
        everything = len(rows) == batch and bool((rows == torch.arange(batch)).all())
        total = None
        for part in parts:
            u, v = part.u.view(batch, length, -1), part.v.view(batch, length, -1)
            if not everything:
                u, v = u[rows], v[rows]
            product = torch.bmm(u.transpose(1, 2), v)
            total = product if total is None else total + product
        assert total is not None
        return total

    def tokens(self, block: Block, response: int, limit: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Factors of the response's first `limit` tokens (0 = all): u, v, and each row's token index.

        The index is None when there is one row per token, in order.
        """
        flat = self.layout.tokens_of(response)
        if limit:
            flat = flat[:limit]
        parts = self.parts[block]
        if len(parts) == 1 and parts[0].positions is None:
            return parts[0].u[flat], parts[0].v[flat], None
        u, v, token = [], [], []
        for part in parts:
            seen, rows = part.find(flat, self.layout.response.numel())
            u.append(part.u[rows])
            v.append(part.v[rows])
            token.append(seen)
        return torch.cat(u), torch.cat(v), torch.cat(token)
