"""A faster decode step for the Llama family on the CPU; everything else takes `ModelDecoder`.

The same mathematics as the model's own forward, from the same parameters. What it saves, at one token per row:
- matrix products are taken as W·xᵀ rather than x·Wᵀ: see `Linear`;
- keys and values go into one preallocated tensor, in place, instead of a growing concatenation;
- query heads that share a key head are treated as query positions, so keys are never repeated;
- no masks are built, rotary angles are looked up, and only rows that move are copied when others leave.
Prompts are read by the model itself; `supports` says which models qualify, and tests compare the logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from gradtrace.rollout.decoder import ModelForward, Prompts, without_adapters
from gradtrace.rollout.llama_weights import WEIGHT_FIRST_ROWS, Layer, Linear, Norm, pair_halves, rotary_table

FAMILY = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
FIXED_ROTARY_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles depend on the position alone, not on how long the sequence became."""


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
        and all(parameter.device.type == "cpu" for parameter in inner.parameters())
        and all(parameter.dtype == torch.float32 for parameter in inner.parameters())
        and all(_is_plain(module) for module in inner.modules())
    )


def _is_plain(module: Any) -> bool:
    library = type(module).__module__
    if library.startswith("peft."):
        ours = (
            type(module).__name__ == "Linear"
            and library == "peft.tuners.lora.layer"
            and _is_plain_lora(module)
        )
    else:
        ours = library.startswith(("torch.nn.modules.", "transformers."))
    has_hooks = module._forward_hooks or module._forward_pre_hooks
    return ours and not has_hooks and "forward" not in vars(module)


def _is_plain_lora(layer: Any) -> bool:
    """W + scaling·BA and nothing else: no DoRA or other variant, no bias, no transposed base layer."""
    return (
        not layer.lora_variant
        and not getattr(layer, "fan_in_fan_out", False)
        and all(up.bias is None for up in layer.lora_B.values())
        and not (layer.merged and layer.disable_adapters)  # peft would un-merge in its forward
    )


class LlamaDecoder:
    """See `Decoder`. Cache: float[layers, B, slots, 2 (keys, values), kv_heads, head_dim], keys with paired halves."""

    def __init__(self, model: Any, prompts: Prompts, row_prompts: Tensor, max_new_tokens: int) -> None:
        """`row_prompts` long[B]: the prompt of each row."""
        mask = prompts.mask()
        logits, cache = ModelForward(model)(prompts.ids, prompts.positions(), mask, None)
        inner: Any = without_adapters(model)
        self.first_logits = logits[row_prompts]
        self.embedding = inner.model.embed_tokens.weight
        self.layers = [Layer.of(layer) for layer in inner.model.layers[: inner.config.num_hidden_layers]]
        self.final_norm = Norm.of(inner.model.norm)
        self.head = Linear.of(inner.lm_head)
        self.positions = prompts.lengths[row_prompts]
        self.filled = prompts.longest
        slots = prompts.longest + max_new_tokens
        self.rotary = rotary_table(inner, slots)

        _, self.kv_heads, _, self.head_dim = cache.layers[0].keys.shape
        self.query_heads = inner.config.num_attention_heads
        shape = (len(self.layers), len(row_prompts), slots, 2, self.kv_heads, self.head_dim)
        self.cache = torch.empty(shape)
        for layer, stored in zip(self.cache, cache.layers, strict=True):
            # Stacked as the cache has it, so that a row is one contiguous piece to copy.
            keys_values = torch.stack([pair_halves(stored.keys, 3), stored.values]).permute(1, 3, 0, 2, 4)
            layer[:, : self.filled] = keys_values.contiguous()[row_prompts]

        self.bias: Tensor | None = None
        """float[B, 1, 1, slots], -inf at padding; None when no prompt is padded."""
        if mask is not None:
            self.bias = torch.zeros(len(row_prompts), 1, 1, slots)
            self.bias[:, 0, 0, : self.filled].masked_fill_(~mask[row_prompts], -torch.inf)

    def step(self, tokens: Tensor) -> Tensor:
        rotation = self.rotary[self.positions]  # complex[B, 1, head_dim / 2]
        x = F.embedding(tokens, self.embedding)  # [B, hidden]
        if len(tokens) in WEIGHT_FIRST_ROWS:
            x = x.t().contiguous().t()  # the layout that `Linear` leaves
        for layer, cache in zip(self.layers, self.cache, strict=True):
            layer.output.add_to_(x, self._attend(layer, layer.attention_norm(x), cache, rotation))
            normed = layer.mlp_norm(x)
            layer.down.add_to_(x, layer.activation(layer.gate(normed)).mul_(layer.up(normed)))
        self.filled += 1
        self.positions = self.positions + 1
        return self.head(self.final_norm(x)).contiguous()

    def _attend(self, layer: Layer, x: Tensor, cache: Tensor, rotation: Tensor) -> Tensor:
        """Attention of the new position [B, hidden] over all slots filled so far, before the output layer."""
        rows, queries, keys = len(x), self.query_heads, self.kv_heads
        heads = layer.qkv(x).contiguous().view(rows, queries + 2 * keys, self.head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            heads[:, :queries] = layer.query_norm(heads[:, :queries])
            heads[:, queries : queries + keys] = layer.key_norm(heads[:, queries : queries + keys])
        torch.view_as_complex(heads[:, : queries + keys].unflatten(2, (-1, 2))).mul_(rotation)
        cache[:rows, self.filled] = heads[:, queries:].view(rows, 2, keys, self.head_dim)
        past_keys, past_values = cache[:rows, : self.filled + 1].permute(2, 0, 3, 1, 4)
        # Query heads of one key head take the place of query positions: [B, kv_heads, group, head_dim].
        attended = F.scaled_dot_product_attention(
            heads[:, :queries].view(rows, keys, -1, self.head_dim),
            past_keys,
            past_values,
            attn_mask=None if self.bias is None else self.bias[:rows, :, :, : self.filled + 1],
            scale=layer.scaling,
        )
        return attended.reshape(rows, -1)

    def keep(self, rows: Tensor) -> None:
        places = torch.arange(len(rows))
        moved = places[rows != places]
        if len(moved):
            self.cache[:, moved, : self.filled] = self.cache[:, rows[moved], : self.filled]
        self.positions = self.positions[rows]
        if self.bias is not None:
            self.bias = self.bias[rows]
