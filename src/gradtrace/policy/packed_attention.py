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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from transformers import AttentionInterface

from gradtrace.errors import GradtraceError
from gradtrace.policy.cpu.short_attention import LONGEST, ShortLayout, causal_attention
from gradtrace.policy.rectangles import Rectangle

NAME = "gradtrace_packed"


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
        return ShortLayout(self.sequences, self.prefixes) if self.sequences.mask.shape[1] <= LONGEST else None

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
