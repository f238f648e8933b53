"""Attention over sequences that stand behind one another in a single row without padding.

A mask of S×S positions would make attention the most expensive part; kernels for packed rows exist on GPUs only.
Here queries, keys and values are laid out as rectangles for the attention alone, so every other layer runs on
real tokens only, on any device. Optionally sequences share a prefix (one prompt, several responses): its
positions are computed once, and every response attends to it.

It is an attention function of transformers, in force inside `packed_attention`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from gradtrace.errors import GradtraceError

NAME = "gradtrace_packed"


class MoveRows(torch.autograd.Function):
    """Row i of the result is row `source[i]` of the input, zero where `source[i]` is −1; no row is taken twice.

    The gradient of a general index adds rows up one by one. Here every row has one destination, so it is the same
    movement backwards (`back`: source and destination swapped), several times as fast.
    """

    @staticmethod
    def forward(rows: Tensor, source: Tensor, back: Tensor) -> Tensor:
        moved = rows.index_select(0, source.clamp(min=0))
        missing = (source < 0).nonzero().squeeze(-1)
        return moved.index_fill_(0, missing, 0.0) if len(missing) else moved

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        _, ctx.source, ctx.back = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return MoveRows.apply(gradient, ctx.back, ctx.source), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return MoveRows.apply(tangent, ctx.source, ctx.back)


@dataclass(frozen=True, eq=False)
class Rectangle:
    """Consecutive runs of a packed row as rows of a rectangle, padded on the right."""

    mask: Tensor
    """bool[R, L]: False in the padding."""
    source: Tensor | None = None
    """long[R·L]: which position of the part stands where; −1 in the padding. None: there is none, a plain view."""
    place: Tensor | None = None
    """long[s]: where each position of the part stands in the flattened rectangle."""

    @staticmethod
    def of(lengths: Tensor) -> Rectangle:
        longest = int(lengths.max()) if len(lengths) else 0
        mask = torch.arange(longest) < lengths[:, None]
        if bool(mask.all()):
            return Rectangle(mask)
        place = mask.flatten().nonzero().squeeze(-1)
        source = torch.full((mask.numel(),), -1)
        source[place] = torch.arange(len(place))
        return Rectangle(mask, source, place)

    def spread(self, part: Tensor) -> Tensor:
        """[s, H, D] → [R, H, L, D]."""
        laid_out = part if self.source is None else MoveRows.apply(part, self.source, self.place)
        return laid_out.unflatten(0, self.mask.shape).transpose(1, 2)

    def collect(self, rectangle: Tensor) -> Tensor:
        """[R, H, L, D] → [s, H, D]."""
        flat = rectangle.transpose(1, 2).flatten(0, 1)
        return flat if self.source is None else MoveRows.apply(flat, self.place, self.source)

    def to(self, device: torch.device) -> Rectangle:
        source, place = (None if index is None else index.to(device) for index in (self.source, self.place))
        return Rectangle(self.mask.to(device), source, place)


@dataclass(frozen=True, eq=False)
class Packing:
    """A packed row: shared prefixes first, if there are any, then the sequences."""

    sequences: Rectangle
    prefixes: Rectangle | None = None
    prefix_of: Tensor | None = None
    """long[R]: the prefix that each sequence continues."""

    def hand_out(self, shared: Tensor) -> Tensor:
        """[G, H, P, D] of the prefixes → [R, H, P, D]: for each sequence that of its prefix."""
        assert self.prefix_of is not None
        groups, rows = len(shared), len(self.prefix_of)
        if rows % groups == 0 and torch.equal(self.prefix_of, even_share(groups, rows).to(shared.device)):
            # As many sequences for each prefix, in order: gradients then add up by a plain sum.
            return shared[:, None].expand(-1, rows // groups, -1, -1, -1).flatten(0, 1)
        return shared.index_select(0, self.prefix_of)

    def to(self, device: torch.device) -> Packing:
        return Packing(
            self.sequences.to(device),
            None if self.prefixes is None else self.prefixes.to(device),
            None if self.prefix_of is None else self.prefix_of.to(device),
        )


def even_share(groups: int, rows: int) -> Tensor:
    return torch.arange(groups).repeat_interleave(rows // groups)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packing: Packing | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The interface of transformers: query [1, H, S, D], key and value [1, K, S, D] → [1, S, H, D]."""
    assert packing is not None
    refuse_unknown(options, packing)
    query, key, value = (heads[0].transpose(0, 1) for heads in (query, key, value))  # [S, H, D]
    grouped: dict[str, Any] = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    if packing.prefixes is None:
        q, k, v = (packing.sequences.spread(part) for part in (query, key, value))
        # Padding is on the right, where causal attention never looks.
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, **grouped)
        return packing.sequences.collect(output)[None], None

    prefixes, sequences = packing.prefixes, packing.sequences
    sizes = [int(part.mask.sum()) for part in (prefixes, sequences)]
    heads = [part.split(sizes) for part in (query, key, value)]
    q, k, v = (prefixes.spread(of_prefixes) for of_prefixes, _ in heads)
    prefix_output = prefixes.collect(F.scaled_dot_product_attention(q, k, v, is_causal=True, **grouped))
    if sequences.mask.shape[1] == 0:  # responses of one token each: all predicted from the prompts
        return prefix_output[None], None
    own_q, own_k, own_v = (sequences.spread(own) for _, own in heads)
    own_k, own_v = (
        torch.cat([packing.hand_out(shared), own], dim=2) for shared, own in ((k, own_k), (v, own_v))
    )
    output = F.scaled_dot_product_attention(own_q, own_k, own_v, attn_mask=visible(packing), **grouped)
    return torch.cat([prefix_output, sequences.collect(output)])[None], None


def visible(packing: Packing) -> Tensor:
    """bool[R or 1, 1, L, P + L]: a token sees its whole prefix and its own sequence up to itself."""
    assert packing.prefixes is not None and packing.prefix_of is not None
    prefixes = packing.prefixes.mask
    length = packing.sequences.mask.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=prefixes.device).tril()
    seen = prefixes[packing.prefix_of] if packing.prefixes.source is not None else prefixes[:1]  # [R or 1, P]
    rows = [seen[:, None].expand(-1, length, -1), causal.expand(len(seen), -1, -1)]
    return torch.cat(rows, dim=-1)[:, None]


def refuse_unknown(options: dict[str, Any], packing: Packing) -> None:
    """Attention variants that this function does not compute must not be computed wrongly."""
    longest = packing.sequences.mask.shape[1]
    if packing.prefixes is not None:
        longest += packing.prefixes.mask.shape[1]
    window = options.get("sliding_window")
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    if window is not None and window < longest:
        unknown.append("sliding_window")
    if unknown:
        raise GradtraceError(
            f"This model's attention uses {unknown[0]}, which packed rows do not support: set actor.packing=never "
            "and actor.share_prompts=false."
        )


AttentionInterface.register(NAME, attend)


def is_supported(model: Any) -> bool:
    """The model calls its attention through transformers' interface and hands options down to it."""
    return bool(getattr(model, "_supports_attention_backend", False))


@contextlib.contextmanager
def packed_attention(model: Any) -> Iterator[None]:
    """Inside, the model attends with `attend`; its forward must be given `packing=`."""
    config = model.config
    previous = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = previous
