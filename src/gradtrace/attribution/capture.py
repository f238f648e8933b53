"""One capture: the factors that a single backward pass delivers, sorted by response."""

from __future__ import annotations

from collections.abc import Mapping
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
    directed: Tensor | None = None
    """bool[B·S]: positions of the responses that loss terms are about, all that modules outside the tail serve; None:
    every position counts."""

    def direct(self, responses: set[int]) -> None:
        self.directed = torch.isin(self.layout.response, torch.tensor(sorted(responses)))

    def wanted(
        self, site: Site, gradient: Tensor, x: Tensor, scored: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The part of a module's output gradient and input that this capture is about, and its flat positions.

        Positions are None where they are all B·S of the layout, in order. A module that is not `scored` serves loss
        terms alone.
        """
        gradient, x, positions = self._seen(site, gradient, x)
        if scored or self.directed is None or bool(self.directed.all()):
            return gradient, x, positions
        gradient, x = gradient.flatten(0, -2), x.flatten(0, gradient.dim() - 2)
        positions = torch.arange(len(self.directed)) if positions is None else positions
        rows = self.directed[positions].nonzero().squeeze(-1)
        chosen = rows.to(gradient.device)
        return gradient[chosen], x[chosen], positions[rows]

    def _seen(self, site: Site, gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """What the module saw of the rows that are not ignored."""
        batch, length = self.layout.full_shape or self.layout.shape
        seen = gradient.shape[:-1].numel()
        kept = self.layout.kept_rows
        if site.name in self.positions:
            positions = self.positions[site.name].cpu()
            if len(positions) != seen:
                raise AttributionError(
                    f"{site.name} ran on {seen} positions, but positions[{site.name!r}] lists {len(positions)}"
                )
            gradient, x = gradient.reshape(seen, -1), x.reshape(seen, *x.shape[gradient.dim() - 1 :])
            if kept is None:
                return gradient, x, positions
            new_row = torch.full((batch,), -1, dtype=torch.long)
            new_row[kept] = torch.arange(len(kept))
            row = new_row[positions // length]
            chosen = (row >= 0).nonzero().squeeze(-1)
            return gradient[chosen], x[chosen], row[chosen] * length + positions[chosen] % length
        if seen == batch * length:
            if kept is None:
                return gradient, x, None
            by_row = (batch, length)
            return gradient.reshape(*by_row, -1)[kept], _by_row(x, by_row)[kept], None
        if gradient.dim() == 3 and gradient.shape[0] == batch and gradient.shape[1] < length:
            # transformers' `logits_to_keep`: the head ran on the last positions of each row.
            if kept is not None:
                gradient, x = gradient[kept], x[kept]
            last = torch.arange(length - gradient.shape[1], length)
            return gradient, x, (torch.arange(len(gradient))[:, None] * length + last).reshape(-1)
        raise AttributionError(
            f"{site.name} ran on {list(gradient.shape[:-1])} positions, but this capture describes {batch} × {length}:"
            " response and tokens must be those of the batch that is going backward. If this module sees only"
            f" some positions, pass positions={{{site.name!r}: long[…]}} to capture()"
        )

    def add(self, block: Block, u: Tensor, v: Tensor, positions: Tensor | None) -> None:
        """Factors of one call, as many rows as `positions` (all of them for None)."""
        u, v = u.reshape(-1, u.shape[-1]), v.reshape(-1, v.shape[-1])
        scale = self.layout.scale
        if isinstance(scale, Tensor):
            u = u * (scale if positions is None else scale[positions]).to(u)
        elif scale != 1.0:
            u = u * scale
        self.parts.setdefault(block, []).append(Part(u, v, positions))

    def gradients(self, block: Block, responses: list[int]) -> Tensor:
        """[n, k_out, k_in]: per response Σ u vᵀ over all its positions, its prompt's included."""
        parts = [self._gradients_of(part, responses) for part in self.parts[block]]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def combined(self, block: Block, weights: Mapping[int, Tensor]) -> Tensor:
        """[m, k_out, k_in]: Σ_r weights[r] · (the gradient of r), for weights [m] of some responses; one product where
        m is 1, and never a gradient for each response."""
        responses = sorted(weights)
        table = torch.stack([weights[r] for r in responses])  # [n, m]
        some = self.parts[block][0].u
        if table.shape[1] > 1:
            return torch.einsum("nm,noi->moi", table.to(some), self.gradients(block, responses))
        by_response = torch.zeros(max(self.layout.responses) + 2, dtype=table.dtype)  # the last one is for −1
        by_response[responses] = table[:, 0]
        by_position = by_response[self.layout.response]
        total = None
        for part in self.parts[block]:
            factor = by_position if part.positions is None else by_position[part.positions]
            rows = factor.nonzero().squeeze(-1)
            chosen = rows.to(part.u.device)
            u, v = (part.u, part.v) if len(rows) == len(factor) else (part.u[chosen], part.v[chosen])
            product = (u * factor[rows][:, None].to(u)).T @ v
            total = product if total is None else total + product
        assert total is not None
        return total[None]

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

    def prefers_products(self, block: Block, members: list[int], tokens: int) -> bool:
        """Whether `products` of these responses, with this many tokens, multiplies less than their gradients would."""
        positions = sum(len(self.layout.positions_of(r)) for r in members)
        through_gradients = (positions + tokens * len(members)) * block.dim
        return len(self.parts[block]) == 1 and positions**2 * (block.k_out + block.k_in) < through_gradients

    def products(self, block: Block, factors: Mapping[int, float], flat: Tensor) -> tuple[Tensor, Tensor]:
        """Of the gradients of n responses, each times its factor: [T, n] with those of the tokens at the flat positions
        (−1 = none, gives zeros), and [n, n] with each other.

        They are sums of (u_s · u_t)(v_s · v_t) over the positions of a response, so that no gradient is formed.
        """
        part, total = self.parts[block][0], self.layout.response.numel()
        positions = torch.cat([self.layout.positions_of(r) for r in factors])
        owner = torch.cat([torch.full((len(self.layout.positions_of(r)),), i) for i, r in enumerate(factors)])
        rows = part.rows_of(positions, total)
        positions, owner, rows = positions[rows >= 0], owner[rows >= 0], rows[rows >= 0].to(part.u.device)
        u, v = part.u[rows], part.v[rows]
        weights = torch.zeros(len(positions), len(factors), dtype=torch.float64)
        weights[torch.arange(len(positions)), owner] = torch.tensor(
            list(factors.values()), dtype=torch.float64
        )[owner]
        mixing = weights.to(u)
        cross = (u @ u.T).mul_(v @ v.T) @ mixing
        place = torch.full((total + 1,), len(positions))  # the last entry answers for −1
        place[positions] = torch.arange(len(positions))
        of_tokens = torch.cat([cross, cross.new_zeros(1, len(factors))])[place[flat].to(cross.device)]
        return of_tokens, mixing.T @ cross

    def tokens(self, block: Block, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Factors at the flat positions [S, T] (−1 = none, gives zeros): u [S, P, T, k_out], v [S, P, T, k_in] for
        the P calls of the module."""
        us, vs = [], []
        for part in self.parts[block]:
            rows = part.rows_of(flat, self.layout.response.numel())
            missing = rows < 0
            chosen = rows.clamp(min=0).flatten().to(part.u.device)
            u, v = (side.index_select(0, chosen).unflatten(0, flat.shape) for side in (part.u, part.v))
            if bool(missing.any()):
                u = u.masked_fill(missing[..., None].to(u.device), 0.0)
                v = v.masked_fill(missing[..., None].to(v.device), 0.0)
            us.append(u)
            vs.append(v)
        return torch.stack(us, 1), torch.stack(vs, 1)


def _by_row(x: Tensor, shape: tuple[int, int]) -> Tensor:
    """Inputs of a linear layer [.., d] or ids of an embedding, as [B, S, …]."""
    return (
        x.reshape(shape)
        if x.numel() == shape[0] * shape[1] and not x.is_floating_point()
        else x.reshape(*shape, -1)
    )
