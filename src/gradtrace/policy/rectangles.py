"""Packed rows as rectangles and back: rows moved to other places, with the same movement backwards as gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Movement:
    """Which row goes where: row i of the result is row `source[i]`, or zero if i is one of the `holes`."""

    source: Tensor
    """long[rows of the result]; anything at the holes."""
    holes: Tensor
    """long."""

    def of(self, rows: Tensor) -> Tensor:
        moved = rows.index_select(0, self.source)
        return moved.index_fill_(0, self.holes, 0.0) if len(self.holes) else moved

    def to(self, device: torch.device) -> Movement:
        return Movement(self.source.to(device), self.holes.to(device))


class MoveRows(torch.autograd.Function):
    """`Movement` of rows where none is taken twice.

    The gradient of a general index adds rows up one by one. Here every row has one destination, so it is the
    movement `back`, several times as fast.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Movement, back: Movement) -> Tensor:
        ctx.there, ctx.back = there, back
        return there.of(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return MoveRows.apply(gradient, ctx.back, ctx.there), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return MoveRows.apply(tangent, ctx.there, ctx.back)


@dataclass(frozen=True, eq=False)
class Rectangle:
    """Consecutive runs of a packed row as rows of a rectangle, padded on the right."""

    mask: Tensor
    """bool[R, L]: False in the padding."""
    into: Movement | None = None
    """From the part of the packed row to the flattened rectangle. None: there is no padding, a plain view will do."""
    out_of: Movement | None = None
    """Inverse of `into`."""

    @staticmethod
    def of(lengths: Tensor) -> Rectangle:
        longest = int(lengths.max()) if len(lengths) else 0
        mask = torch.arange(longest) < lengths[:, None]
        if bool(mask.all()):
            return Rectangle(mask)
        flat = mask.flatten()
        place = flat.nonzero().squeeze(-1)
        source = torch.zeros(len(flat), dtype=torch.long)
        source[place] = torch.arange(len(place))
        return Rectangle(mask, Movement(source, (~flat).nonzero().squeeze(-1)), Movement(place, place.new_empty(0)))

    @property
    def size(self) -> int:
        """Positions that are no padding; asks shapes alone, so that no device has to answer."""
        return self.mask.numel() if self.out_of is None else len(self.out_of.source)

    def spread(self, part: Tensor) -> Tensor:
        """[s, H, D] → [R, H, L, D]."""
        laid_out = part if self.into is None else MoveRows.apply(part, self.into, self.out_of)
        return laid_out.unflatten(0, self.mask.shape).transpose(1, 2)

    def collect(self, rectangle: Tensor) -> Tensor:
        """[R, H, L, D] → [s, H, D]."""
        flat = rectangle.transpose(1, 2).flatten(0, 1)
        return flat if self.into is None else MoveRows.apply(flat, self.out_of, self.into)

    def to(self, device: torch.device) -> Rectangle:
        into, out_of = (None if movement is None else movement.to(device) for movement in (self.into, self.out_of))
        return Rectangle(self.mask.to(device), into, out_of)

    def by_head(self, groups: int, key_heads: int, heads: int) -> tuple[Movement, Movement]:
        """Rearranges the part with its heads as rows [s·H, D] to [G, K, R/G, H/K, L, D], and back.

        Query heads stand beside the positions that share their keys, responses beside those that share their
        prompt; so products over keys are large ones. The rectangle's rows are G groups of as many responses.
        """
        flat = self.mask.flatten()
        position = torch.full((len(flat),), -1, device=flat.device)
        position[flat] = torch.arange(int(flat.sum()), device=flat.device)
        position = position.view(groups, 1, -1, 1, self.mask.shape[1])
        head = torch.arange(heads, device=flat.device).view(1, key_heads, 1, -1, 1)
        source = torch.where(position < 0, -1, position * heads + head).flatten()
        place = torch.empty(int(flat.sum()) * heads, dtype=torch.long, device=flat.device)
        filled = (source >= 0).nonzero().squeeze(-1)
        place[source[filled]] = filled
        return (
            Movement(source.clamp(min=0), (source < 0).nonzero().squeeze(-1)),
            Movement(place, place.new_empty(0)),
        )
