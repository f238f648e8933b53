"""A faster decoder for the Llama family on the CPU; everything else takes `ModelDecoder`.

The same mathematics as the model's own forward, from the same parameters. What it saves, at one token per row:
- matrix products read weights in an order that suits few rows: see `Linear`;
- keys and values go into preallocated tensors, in place, which grow seldom and leave no gaps for the processor to
  stumble over (see `LlamaDecoder`);
- query heads that share a key head are treated as query positions, so keys are never repeated;
- a prompt that is the beginning of another one in the batch is not read again;
- no masks are built, rotary angles are looked up, and only rows that move are copied when others leave.
`supports` says which models qualify, and tests compare the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from gradtrace.rollout.decoder import Prompts, without_adapters
from gradtrace.rollout.llama_weights import (
    Layer,
    Linear,
    Norm,
    packing_pays,
    rotary_table,
    weights_first,
)

FAMILY = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
FIXED_ROTARY_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles depend on the position alone, not on how long the sequence became."""
FEWEST_SLOTS = 16
"""Attention looks at no fewer slots, empty ones included: a softmax over fewer than torch's vectors hold, and products
of so few numbers, take other ways that are four to ten times as slow. The cache also grows by no fewer."""


def supports(model: nn.Module) -> bool:
    """Whether `LlamaDecoder` computes exactly what this model computes.

    Exact classes are asked for, and no hooks or replaced forwards: a subclass, a wrapped layer or a hook may compute
    something else, and then the model's own forward is the only right answer.
    """
    inner: Any = without_adapters(model)
    if type(inner) not in FAMILY:
        return False
    config = inner.config
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        full_attention = getattr(config, "sliding_window", None) is None
    else:
        full_attention = set(layer_types) == {"full_attention"}
    return (
        full_attention
        and config.rope_parameters["rope_type"] in FIXED_ROTARY_TYPES
        and 2 * len(inner.model.rotary_emb.inv_freq) == inner.model.layers[0].self_attn.head_dim
        and config._attn_implementation in ("sdpa", "eager")
        and all(parameter.device.type == "cpu" and parameter.dtype == torch.float32 for parameter in inner.parameters())
        and all(_is_plain(module) for module in inner.modules())
    )


def _is_plain(module: Any) -> bool:
    library = type(module).__module__
    if library.startswith("peft."):
        ours = type(module).__name__ == "Linear" and library == "peft.tuners.lora.layer" and _is_plain_lora(module)
    else:
        ours = library.startswith(("torch.nn.modules.", "transformers."))
    has_hooks = module._forward_hooks or module._forward_pre_hooks
    replaced = vars(module).get("forward")
    return ours and not has_hooks and (replaced is None or getattr(replaced, "computes_the_same", False))


def _is_plain_lora(layer: Any) -> bool:
    """W + scaling·BA and nothing else: no DoRA or other variant, no bias, no transposed base layer."""
    return (
        not layer.lora_variant
        and not getattr(layer, "fan_in_fan_out", False)
        and all(up.bias is None for up in layer.lora_B.values())
        and not (layer.merged and layer.disable_adapters)  # peft would un-merge in its forward
    )


class LlamaDecoder:
    """See `Decoder`. Cache of a layer: float[2 (keys, values), B, kv_heads, slots, head_dim], keys with paired halves.

    Attention looks at all slots of the cache, those that are still empty included, and the cache grows by a few slots
    at a time. Left out, they would be a gap before the next head's keys, where the processor stops reading ahead: with
    18 of 28 slots in use attention took twice as long, with 80 of 97 half as long again (AMD EPYC).
    """

    def __init__(self, model: Any, prompts: Prompts, row_prompts: Tensor, max_new_tokens: int) -> None:
        """`row_prompts` long[B]: the prompt of each row."""
        inner: Any = without_adapters(model)
        self.embedding = inner.model.embed_tokens.weight
        self.packs = packing_pays(inner, max_new_tokens)
        layers = inner.model.layers[: inner.config.num_hidden_layers]
        self.layers = [Layer.of(layer, self.packs) for layer in layers]
        self.final_norm = Norm.of(inner.model.norm)
        head = Linear.of(inner.lm_head)
        self.head = head.packed() if self.packs else head
        self.query_heads, self.kv_heads = inner.config.num_attention_heads, inner.config.num_key_value_heads
        self.head_dim = inner.model.layers[0].self_attn.head_dim

        self.nothing = torch.zeros(1, 1, 1)
        self.most_slots = slots = max(prompts.longest + max_new_tokens, FEWEST_SLOTS)
        self.rotary = rotary_table(inner, slots)
        self.filled = prompts.longest
        """Slots of every row that hold a token, or the padding before its prompt."""
        self.cache = [self._empty_cache(len(row_prompts)) for _ in self.layers]
        self.first_logits = self._read(prompts, row_prompts)

        self.padding = prompts.longest - prompts.lengths[row_prompts]
        self.bias: Tensor | None = None
        """float[B, 1, 1, slots], -inf at padding; None when no prompt is padded."""
        mask = prompts.mask()
        if mask is not None:
            self.bias = torch.zeros(len(row_prompts), 1, 1, slots)
            self.bias[:, 0, 0, : self.filled].masked_fill_(~mask[row_prompts], -torch.inf)

    def _empty_cache(self, rows: int) -> Tensor:
        """Of one layer: what is filled already, and room for some more tokens."""
        room = max(FEWEST_SLOTS, self.filled // 8)
        little_is_left = self.most_slots - self.filled < 2 * room
        slots = self.most_slots if little_is_left else self.filled + room
        cache = torch.empty(2, rows, self.kv_heads, slots, self.head_dim)
        cache[1, :, :, self.filled :] = 0.0  # seen before they are written: no NaN may be there
        return cache

    def _grow(self, rows: int) -> None:
        """Make room in the cache, layer by layer, so that only one of them is there twice."""
        for index, old in enumerate(self.cache):
            self.cache[index] = self._empty_cache(rows)
            self.cache[index][:, :, :, : self.filled] = old[:, :rows]

    def _read(self, prompts: Prompts, row_prompts: Tensor) -> Tensor:
        """Fill the cache with the prompts, each read once; the logits [B, V] of the rows' first tokens."""
        everyone = prompts
        prompts, reader = everyone.readers()
        count, length = prompts.ids.shape
        # long[P, L]: where the reader of each prompt has what belongs into a slot of the prompt (or into its padding)
        shift = prompts.longest - prompts.lengths[reader] - (everyone.longest - everyone.lengths)
        source = (torch.arange(length) + shift[:, None]).clamp_(min=0)
        mask = prompts.mask()
        allowed: Tensor | None = None
        if mask is not None:
            causal = torch.ones(length, length, dtype=torch.bool).tril_()
            # Padding looks at padding: a row of the softmax without any entry would be NaN, and NaN spreads.
            allowed = (causal & (mask[:, None, :] | ~mask[:, :, None]))[:, None]  # [P, 1, L, L]

        def attend(layer: Layer, cache: Tensor, heads: Tensor) -> Tensor:
            heads = heads.view(count, length, -1, self.head_dim).transpose(1, 2)  # [P, heads, L, head_dim]
            keys_values = heads[:, self.query_heads :].unflatten(1, (2, -1)).transpose(0, 1)
            # In order first: copied out of its strides for every row it would take as long as several steps.
            own = keys_values.contiguous()
            if count < len(reader):
                own = own[:, reader[:, None], :, source].permute(2, 0, 3, 1, 4).contiguous()
            cache[:, :, :, :length] = own.index_select(1, row_prompts)
            keys, values = keys_values
            attended = F.scaled_dot_product_attention(
                heads[:, : self.query_heads],
                keys,
                values,
                attn_mask=allowed,
                is_causal=allowed is None,
                scale=layer.scaling,
                enable_gqa=self.query_heads != self.kv_heads,
            )
            return attended.transpose(1, 2).reshape(count * length, -1)

        x = self._forward(prompts.ids.flatten(), self.rotary[prompts.positions().flatten()], attend)
        return self._logits(x.view(count, length, -1)[reader, source[:, -1]])[row_prompts]

    def step(self, tokens: Tensor) -> Tensor:
        rows, slots = len(tokens), self.filled + 1
        if slots > self.cache[0].shape[3]:
            self._grow(rows)
        seen = self.cache[0].shape[3]
        bias = None if self.bias is None else self.bias[:, :, :, :seen]

        def attend(layer: Layer, cache: Tensor, heads: Tensor) -> Tensor:
            cache[:, :rows, :, self.filled] = heads[:, self.query_heads :].unflatten(1, (2, -1)).transpose(0, 1)
            # One small product per row and key head; its query heads take the place of query positions.
            keys, values = cache[:, :rows].flatten(1, 2)  # [B · kv_heads, slots, head_dim]
            queries = heads[:, : self.query_heads].reshape(len(keys), -1, self.head_dim)
            scores = torch.baddbmm(
                self.nothing, queries, keys.transpose(1, 2), beta=0, alpha=layer.scaling
            )  # scaled by the product itself
            if bias is not None:
                scores.view(rows, self.kv_heads, -1, seen).add_(bias)
            if seen > slots:
                scores[:, :, slots:] = -torch.inf
            attended = torch.bmm(scores.softmax(-1), values)
            return attended.reshape(rows, -1)

        # complex[B, 1, head_dim / 2], or complex[1, head_dim / 2] when every row is at the same position
        rotation = self.rotary[self.filled if self.bias is None else self.filled - self.padding]
        x = self._forward(tokens, rotation, attend)
        self.filled = slots
        return self._logits(x)

    def _forward(self, ids: Tensor, rotation: Tensor, attend: Callable[[Layer, Tensor, Tensor], Tensor]) -> Tensor:
        """All layers for N positions: long[N] to [N, hidden]. `attend(layer, cache, heads)` mixes the positions.

        heads: [N, query_heads + 2 · kv_heads, head_dim], rotated; the result is [N, query_heads · head_dim].
        """
        x = F.embedding(ids, self.embedding)
        if weights_first(len(ids)) and not self.packs:
            x = x.t().contiguous().t()  # the layout that `Linear` leaves
        for layer, cache in zip(self.layers, self.cache, strict=True):
            heads = self._rotated_heads(layer, layer.attention_norm(x), rotation)
            layer.output.add_to_(x, attend(layer, cache, heads))
            normed = layer.mlp_norm(x)
            layer.down.add_to_(x, layer.activation(layer.gate(normed)).mul_(layer.up(normed)))
        return x

    def _rotated_heads(self, layer: Layer, x: Tensor, rotation: Tensor) -> Tensor:
        queries, rotated = self.query_heads, self.query_heads + self.kv_heads
        heads = layer.qkv(x).contiguous().view(len(x), -1, self.head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            heads[:, :queries] = layer.query_norm(heads[:, :queries])
            heads[:, queries:rotated] = layer.key_norm(heads[:, queries:rotated])
        torch.view_as_complex(heads[:, :rotated].unflatten(2, (-1, 2))).mul_(rotation)
        return heads

    def _logits(self, x: Tensor) -> Tensor:
        return self.head(self.final_norm(x)).contiguous()

    def keep(self, rows: Tensor) -> None:
        places = torch.arange(len(rows))
        moved = places[rows != places]
        if len(moved):
            for cache in self.cache:
                cache[:, moved, :, : self.filled] = cache[:, rows[moved], :, : self.filled]
        if self.bias is not None:
            self.bias, self.padding = self.bias[rows], self.padding[rows]
