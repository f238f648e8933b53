"""One capture: the factors that a single backward pass delivers, sorted by response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from gradtrace.attribution.errors import AttributionError
from gradtrace.attribution.factors.layout import Layout, chosen_rows
from gradtrace.attribution.factors.modules import Block, Site

LIKE_WIDTHS = 8
"""Sides whose widths round up to the same multiple of it are filled up to one width and taken together: another few
columns of zeros cost less than another round of small operations."""
LITTLE_PADDING = 1.25
"""Responses of packed rows are multiplied side by side where filling them up to the longest takes no more than this."""


@dataclass(eq=False)
class Part:
    """The factors of one call of a module: U [rows, k_out], V [rows, k_in]; or of M modules of one shape, side by side:
    [M, rows, …]."""

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


def side_by_side(parts: Sequence[Part]) -> Part:
    """One call of each of M modules that saw the same positions, [M, rows, …]."""
    first = parts[0]
    if len(parts) == 1:
        return Part(first.u[None], first.v[None], first.positions)
    return Part(_stacked([p.u for p in parts]), _stacked([p.v for p in parts]), first.positions)


def _stacked(sides: list[Tensor]) -> Tensor:
    """[M, rows, k] of sides [rows, k_m]; narrow ones are filled up with zeros, which change no product."""
    widest = max(side.shape[1] for side in sides)
    return torch.stack([side if side.shape[1] == widest else pad(side, (0, widest - side.shape[1])) for side in sides])


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
        directed = torch.isin(self.layout.response, torch.tensor(sorted(responses)))
        self.directed = None if bool(directed.all()) else directed

    @cached_property
    def _directed_positions(self) -> Tensor:
        """long: the positions in `directed`."""
        assert self.directed is not None
        return self.directed.nonzero().squeeze(-1)

    def wanted(
        self, site: Site, gradient: Tensor, x: Tensor, scored: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The part of a module's output gradient and input that this capture is about, and its flat positions.

        Positions are None where they are all B·S of the layout, in order. A module that is not `scored` serves loss
        terms alone.
        """
        gradient, x, positions = self._seen(site, gradient, x)
        if scored or self.directed is None:
            return gradient, x, positions
        gradient, x = gradient.flatten(0, -2), x.flatten(0, gradient.dim() - 2)
        if positions is None:
            rows = positions = self._directed_positions
        else:
            rows = self.directed[positions].nonzero().squeeze(-1)
            positions = positions[rows]
        chosen = chosen_rows(rows, gradient.device)
        return gradient[chosen], x[chosen], positions

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

    def kind(self, block: Block) -> tuple[object, ...]:
        """Modules of one kind can be taken together: their factors have as many rows, and about the same width."""
        calls = tuple((len(part.u), id(part.positions)) for part in self.parts[block])
        if block.preconditioner is not None:
            return (block.scored, block.k_out, block.k_in, *calls)
        return (block.scored, -(-block.k_out // LIKE_WIDTHS), -(-block.k_in // LIKE_WIDTHS), None, *calls)

    def take(self, blocks: Sequence[Block]) -> list[Part]:
        """The calls of modules of one kind, side by side; they are not kept any longer."""
        return [side_by_side(call) for call in zip(*(self.parts.pop(block) for block in blocks), strict=True)]

    def gradients(self, calls: Sequence[Part], responses: list[int]) -> Tensor:
        """[M, n, k_out, k_in]: per response Σ u vᵀ over all its positions, its prompt's included."""
        parts = [self._gradients_of(part, responses) for part in calls]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def combined(self, calls: Sequence[Part], weights: Mapping[int, Tensor]) -> Tensor:
        """[M, m, k_out, k_in]: Σ_r weights[r] · (the gradient of r), for weights [m] of some responses; one product
        where m is 1, and never a gradient for each response."""
        responses = sorted(weights)
        table = torch.stack([weights[r] for r in responses])  # [n, m]
        if table.shape[1] > 1:
            return torch.einsum("nm,bnoi->bmoi", table.to(calls[0].u), self.gradients(calls, responses))
        by_response = torch.zeros(max(self.layout.responses) + 2, dtype=table.dtype)  # the last one is for −1
        by_response[responses] = table[:, 0]
        by_position = by_response[self.layout.response]
        total = None
        for part in calls:
            factor = by_position if part.positions is None else by_position[part.positions]
            rows = factor.nonzero().squeeze(-1)
            chosen = chosen_rows(rows, part.u.device)
            u, v = part.u[:, chosen], part.v[:, chosen]
            product = (u * factor[rows][:, None].to(u)).mT @ v
            total = product if total is None else total + product
        assert total is not None
        return total[:, None]

    def _gradients_of(self, part: Part, responses: list[int]) -> Tensor:
        if self.layout.row_response is None or part.positions is not None:
            total = self.layout.response.numel()
            positions = [self.layout.positions_of(response) for response in responses]
            longest = max(len(own) for own in positions)
            if longest * len(responses) <= LITTLE_PADDING * sum(len(own) for own in positions):
                flat = pad_sequence(positions, batch_first=True, padding_value=-1)
                u, v = (side.squeeze(2) for side in self.tokens([part], flat))
                return u.mT @ v
            products = []
            for own in positions:
                rows = part.rows_of(own, total)
                chosen = chosen_rows(rows[rows >= 0], part.u.device)
                products.append(part.u[:, chosen].mT @ part.v[:, chosen])
            return torch.stack(products, 1)
        u, v = part.u.unflatten(1, self.layout.shape), part.v.unflatten(1, self.layout.shape)
        chosen = self.layout.index_of(responses, u.device)
        return u[:, chosen].mT @ v[:, chosen]

    def prefers_products(self, block: Block, members: list[int], tokens: int) -> bool:
        """Whether `products` of these responses, with this many tokens, multiplies less than their gradients would."""
        positions = sum(len(self.layout.positions_of(r)) for r in members)
        through_gradients = (positions + tokens * len(members)) * block.dim
        return positions**2 * (block.k_out + block.k_in) < through_gradients

    def products(self, calls: Sequence[Part], factors: Mapping[int, float], flat: Tensor) -> tuple[Tensor, Tensor]:
        """Of the gradients of n responses, each times its factor: [M, T, n] with those of the tokens at the flat
        positions (−1 = none, gives zeros), and [M, n, n] with each other. For modules that were called once.

        They are sums of (u_s · u_t)(v_s · v_t) over the positions of a response, so that no gradient is formed.
        """
        (part,), total = calls, self.layout.response.numel()
        positions = torch.cat([self.layout.positions_of(r) for r in factors])
        owner = torch.cat([torch.full((len(self.layout.positions_of(r)),), i) for i, r in enumerate(factors)])
        rows = part.rows_of(positions, total)
        positions, owner, rows = positions[rows >= 0], owner[rows >= 0], rows[rows >= 0]
        chosen = chosen_rows(rows, part.u.device)
        weights = torch.zeros(len(positions), len(factors), dtype=torch.float64)
        weights[torch.arange(len(positions)), owner] = torch.tensor(list(factors.values()), dtype=torch.float64)[owner]
        mixing = weights.to(part.u)
        # One module after the other: a product of positions with each other is large.
        sides = ((u[chosen], v[chosen]) for u, v in zip(part.u, part.v, strict=True))
        cross = torch.stack([(u @ u.T).mul_(v @ v.T) @ mixing for u, v in sides])
        place = torch.full((total + 1,), len(positions))  # the last entry answers for −1
        place[positions] = torch.arange(len(positions))
        with_none = torch.cat([cross, cross.new_zeros(len(cross), 1, len(factors))], 1)
        return with_none[:, place[flat].to(cross.device)], mixing.T @ cross

    def tokens(self, calls: Sequence[Part], flat: Tensor) -> tuple[Tensor, Tensor]:
        """Factors at the flat positions [S, T] (−1 = none, gives zeros): u [M, S, P, T, k_out], v [M, S, P, T, k_in]
        for the P calls of each module."""
        us, vs = [], []
        for part in calls:
            rows = part.rows_of(flat, self.layout.response.numel())
            missing = rows < 0
            chosen = rows.clamp(min=0).flatten().to(part.u.device)
            u, v = (side.index_select(1, chosen).unflatten(1, flat.shape) for side in (part.u, part.v))
            if bool(missing.any()):
                u = u.masked_fill(missing[..., None].to(u.device), 0.0)
                v = v.masked_fill(missing[..., None].to(v.device), 0.0)
            us.append(u)
            vs.append(v)
        if len(calls) == 1:
            return us[0].unsqueeze(2), vs[0].unsqueeze(2)
        return torch.stack(us, 2), torch.stack(vs, 2)


def _by_row(x: Tensor, shape: tuple[int, int]) -> Tensor:
    """Inputs of a linear layer [.., d] or ids of an embedding, as [B, S, …]."""
    return x.reshape(shape) if x.numel() == shape[0] * shape[1] and not x.is_floating_point() else x.reshape(*shape, -1)
