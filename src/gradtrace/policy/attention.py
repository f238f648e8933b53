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
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from transformers import AttentionInterface

from gradtrace.errors import GradtraceError

if TYPE_CHECKING:
    from gradtrace.policy.cpu.attention import ShortLayout

NAME = "gradtrace_packed"


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


@dataclass(frozen=True, eq=False)
class Packing:
    """A packed row: shared prefixes first, if there are any, then the sequences."""

    sequences: Rectangle
    prefixes: Rectangle | None = None
    prefix_of: Tensor | None = None
    """long[R]: the prefix that each sequence continues."""

    @cached_property
    def longest(self) -> int:
        """Positions of the longest sequence, its prefix included, or a bit more."""
        return self.sequences.mask.shape[1] + (0 if self.prefixes is None else self.prefixes.mask.shape[1])

    @cached_property
    def is_even(self) -> bool:
        """Whether every prefix has as many sequences as the others, in order."""
        assert self.prefixes is not None and self.prefix_of is not None
        groups, rows = len(self.prefixes.mask), len(self.prefix_of)
        in_order = torch.arange(rows, device=self.prefix_of.device) // max(1, rows // groups)
        return rows % groups == 0 and torch.equal(self.prefix_of, in_order)

    @cached_property
    def short(self) -> ShortLayout | None:
        """Set where `ShortAttention` is the faster way."""
        if self.prefixes is None or self.sequences.mask.device.type != "cpu" or not self.is_even:
            return None
        from gradtrace.policy.cpu import attention as cpu  # which builds on the rectangles above

        is_short = self.sequences.mask.shape[1] <= cpu.LONGEST
        return cpu.ShortLayout(self.sequences, self.prefixes) if is_short else None

    def hand_out(self, shared: Tensor) -> Tensor:
        """[G, H, P, D] of the prefixes → [R, H, P, D]: for each sequence that of its prefix."""
        assert self.prefix_of is not None
        if self.is_even:  # gradients then add up by a plain sum
            each = len(self.prefix_of) // len(shared)
            return shared[:, None].expand(-1, each, -1, -1, -1).flatten(0, 1)
        return shared.index_select(0, self.prefix_of)

    def to(self, device: torch.device) -> Packing:
        if self.prefixes is None or self.prefix_of is None:
            return Packing(self.sequences.to(device))
        moved = Packing(self.sequences.to(device), self.prefixes.to(device), self.prefix_of.to(device))
        moved.__dict__["is_even"] = self.is_even  # answered where nobody has to wait for it
        return moved


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
    heads = [part.split([prefixes.size, sequences.size]) for part in (query, key, value)]
    q, k, v = (prefixes.spread(of_prefixes) for of_prefixes, _ in heads)
    if packing.short is not None and forward_ad.unpack_dual(k).tangent is not None:
        from gradtrace.policy.cpu.attention import causal_attention

        prefix_output = prefixes.collect(causal_attention(q, k, v, scaling or query.shape[-1] ** -0.5))
    else:
        prefix_output = prefixes.collect(F.scaled_dot_product_attention(q, k, v, is_causal=True, **grouped))
    if sequences.mask.shape[1] == 0:  # responses of one token each: all predicted from the prompts
        return prefix_output[None], None
    own_q, own_k, own_v = (own for _, own in heads)
    if packing.short is not None:
        output = packing.short.attend(own_q, own_k, own_v, k, v, scaling or query.shape[-1] ** -0.5)
        return torch.cat([prefix_output, output])[None], None
    own_q, own_k, own_v = (sequences.spread(part) for part in (own_q, own_k, own_v))
    own_k, own_v = (torch.cat([packing.hand_out(shared), own], dim=2) for shared, own in ((k, own_k), (v, own_v)))
    output = F.scaled_dot_product_attention(own_q, own_k, own_v, attn_mask=visible(packing), **grouped)
    return torch.cat([prefix_output, sequences.collect(output)])[None], None


def visible(packing: Packing) -> Tensor:
    """bool[R or 1, 1, L, P + L]: a token sees its whole prefix and its own sequence up to itself."""
    assert packing.prefixes is not None and packing.prefix_of is not None
    prefixes = packing.prefixes.mask
    length = packing.sequences.mask.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=prefixes.device).tril()
    seen = prefixes[packing.prefix_of] if packing.prefixes.into is not None else prefixes[:1]  # [R or 1, P]
    rows = [seen[:, None].expand(-1, length, -1), causal.expand(len(seen), -1, -1)]
    return torch.cat(rows, dim=-1)[:, None]


def refuse_unknown(options: dict[str, Any], packing: Packing) -> None:
    """Attention variants that this function does not compute must not be computed wrongly."""
    window = options.get("sliding_window")
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    if window is not None and window < packing.longest:
        unknown.append("sliding_window")
    if unknown:
        raise GradtraceError(
            f"This model's attention uses {unknown[0]}, which packed rows do not support: set actor.packing=never "
            "and actor.share_prompts=never."
        )


AttentionInterface.register(NAME, attend)


def is_supported(model: Any) -> bool:
    """The model calls its attention through transformers' interface and hands options down to it, and no layer of
    another kind mixes positions: a convolution or a recurrence would run from one sequence of a row into the next."""
    if not getattr(model, "_supports_attention_backend", False):
        return False
    kinds = set(getattr(model.config, "layer_types", None) or ())
    return kinds <= ATTENTION_LAYERS and not any(isinstance(module, nn.Conv1d) for module in model.modules())


ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
"""What transformers calls layers that mix positions by attention alone."""
SAME = 1e-4
"""By which share of the largest logit two passes may differ that compute the same."""


@torch.no_grad()
def can_attend(model: Any, longest: int) -> bool:
    """Whether the model computes packed sequences of up to `longest` positions as it computes them alone. It is asked:
    two sequences of two tokens behind one another, and the second by itself. So whatever a layer wants of its
    attention that `attend` does not do shows here, and not in a gradient that is wrong without a word."""
    if not is_supported(model):
        return False
    packing = Packing(Rectangle.of(torch.tensor([2, 2]))).to(model.device)
    packing.__dict__["longest"] = longest
    ids = torch.tensor([[0, 1, 1, 0]], device=model.device)
    positions = torch.tensor([[0, 1, 0, 1]], device=model.device)
    was_training = model.training
    model.eval()
    try:
        alone = model(input_ids=ids[:, 2:], use_cache=False).logits
        with packed_attention(model):
            packed = model(input_ids=ids, position_ids=positions, packing=packing, use_cache=False).logits[:, 2:]
    except GradtraceError:
        return False
    finally:
        model.train(was_training)
    return bool((packed - alone).abs().max() <= SAME * alone.abs().max())


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
