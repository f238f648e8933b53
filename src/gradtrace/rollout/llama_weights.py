"""The parameters of a Llama-family model, arranged for decoding one token per row.

For long responses of models that are neither small nor large they are copied into the order in which oneDNN reads
them (`Linear.packed`). Else most of them are the model's own tensors; copied are only the query, key and value weights,
which are joined, and layers with LoRA adapters, which are added up. A decoder makes these copies anew, so they are
never stale.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _is_intel() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "GenuineIntel" in cpuinfo.read_text()


WEIGHT_FIRST_ROWS = range(4, 49) if _is_intel() else range(0)
"""The numbers of rows for which W·xᵀ beats x·Wᵀ in MKL: on Intel's processors up to three times; on an AMD EPYC it is
up to four times slower."""
PACKED_STEPS = 32
"""From so many new tokens on packed weights pay: packing takes about as long as five steps save."""
PACKED_WEIGHTS = range(2**18, 2**29)
"""Sizes of layers that are packed, and of models: calls of smaller layers are mostly overhead, and of a larger model a
second copy of the weights is too much memory."""


def weights_first(rows: int) -> bool:
    """Whether the weights are the left side of a product with so many rows."""
    return rows in WEIGHT_FIRST_ROWS


def packing_pays(model: nn.Module, max_new_tokens: int) -> bool:
    """Whether a decoder should copy the weights into oneDNN's order. Depends on sizes alone, so that the same run makes
    the same rounding errors."""
    known = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    weights = sum(parameter.numel() for parameter in model.parameters())
    return known and max_new_tokens >= PACKED_STEPS and weights in PACKED_WEIGHTS


def pair_halves(heads: Tensor, dim: int) -> Tensor:
    """Reorder dimension `dim`, a head's: entries i and i + head_dim/2 become neighbours.

    The rotary embedding turns these two as a pair. Side by side they are one complex number, and turning every head
    is a single product; queries and keys that are reordered alike have the same dot products as before.
    """
    return heads.unflatten(dim, (2, -1)).transpose(dim, dim + 1).flatten(dim, dim + 1)


@dataclass
class Linear:
    """Weight [out, in] and bias [out] of a linear layer."""

    weight: Tensor
    bias: Tensor | None
    is_packed: bool = False

    @staticmethod
    def of(layer: Any) -> Linear:
        """Read the weights of an nn.Linear, or of peft's LoRA around one."""
        if isinstance(layer, nn.Linear):
            return Linear(layer.weight, layer.bias)
        weight = layer.base_layer.weight
        if not layer.merged and not layer.disable_adapters:
            for adapter in layer.active_adapters:
                if adapter in layer.lora_A:
                    product = layer.lora_B[adapter].weight @ layer.lora_A[adapter].weight
                    weight = weight + layer.scaling[adapter] * product
        return Linear(weight, layer.base_layer.bias)

    @staticmethod
    def joined(layers: list[Linear]) -> Linear:
        """Layers that read the same input, as one."""
        biases = [layer.bias for layer in layers if layer.bias is not None]
        return Linear(torch.cat([layer.weight for layer in layers]), torch.cat(biases) if biases else None)

    def with_paired_halves(self, head_dim: int) -> Linear:
        weight = pair_halves(self.weight.unflatten(0, (-1, head_dim)), 1).flatten(0, 1)
        if self.bias is None:
            return Linear(weight, None)
        return Linear(weight, pair_halves(self.bias.unflatten(0, (-1, head_dim)), 1).flatten())

    def packed(self) -> Linear:
        """The same layer with a copy of its weight in the order in which oneDNN reads it, if it is large enough.

        A product with few rows is bound by reading the weights, and BLAS puts them in its own order at every call:
        with packed ones it is 1.3 to 2.5 times as fast for up to 48 rows (AMD EPYC, float32).
        """
        if self.weight.numel() not in PACKED_WEIGHTS:
            return self
        some_rows = 16  # what the order is chosen for; as good for any other number
        return Linear(torch.ops.mkldnn._reorder_linear_weight(self.weight, some_rows), self.bias, True)

    def __call__(self, x: Tensor) -> Tensor:
        """[B, in] to [B, out], in whatever memory layout comes out fastest.

        F.linear makes BLAS treat the few rows as the long side and repack the weights at every call. With the
        weights first the product is 2 to 3 times as fast for 8 to 48 rows (MKL on Intel, float32), and leaves [out, B]
        in memory, which is seen here as [B, out] with swapped strides; the next product wants just that.
        """
        if self.is_packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        if not weights_first(len(x)):
            return F.linear(x, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(self.weight, x.t()).t()
        return torch.addmm(self.bias[:, None], self.weight, x.t()).t()

    def add_to_(self, residual: Tensor, x: Tensor) -> None:
        """residual [B, out] += layer(x [B, in]), accumulated by the product itself where that can be."""
        if self.is_packed:
            residual.add_(self(x))
            return
        if weights_first(len(x)):
            residual.t().addmm_(self.weight, x.t())
        else:
            residual.addmm_(x, self.weight.t())
        if self.bias is not None:
            residual.add_(self.bias)


@dataclass
class Norm:
    """The family's RMSNorm over the last dimension, for any memory layout."""

    weight: Tensor
    epsilon: Tensor

    @staticmethod
    def of(norm: Any) -> Norm:
        return Norm(norm.weight, torch.tensor(norm.variance_epsilon))

    def with_paired_halves(self) -> Norm:
        return Norm(pair_halves(self.weight, 0), self.epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_contiguous():
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # one pass, but slow along a stride
            mean_square = torch.addcmul(self.epsilon, length, length, value=1 / x.shape[-1])
        else:
            mean_square = torch.add(self.epsilon, x.square().sum(-1, keepdim=True), alpha=1 / x.shape[-1])
        return (x * mean_square.rsqrt_()).mul_(self.weight)


@dataclass
class Layer:
    """One decoder layer. Looking parameters up through five modules would cost more than a small product."""

    attention_norm: Norm
    qkv: Linear
    """Query heads, key heads, value heads; the first two with paired halves."""
    query_norm: Norm | None
    key_norm: Norm | None
    scaling: float
    output: Linear
    mlp_norm: Norm
    gate: Linear
    up: Linear
    activation: nn.Module
    down: Linear

    @staticmethod
    def of(layer: Any, pack: bool) -> Layer:
        def ready(linear: Linear) -> Linear:
            return linear.packed() if pack else linear

        attention, mlp = layer.self_attn, layer.mlp
        queries = Linear.of(attention.q_proj).with_paired_halves(attention.head_dim)
        keys = Linear.of(attention.k_proj).with_paired_halves(attention.head_dim)
        norms_heads = hasattr(attention, "q_norm")  # Qwen3
        return Layer(
            attention_norm=Norm.of(layer.input_layernorm),
            qkv=ready(Linear.joined([queries, keys, Linear.of(attention.v_proj)])),
            query_norm=Norm.of(attention.q_norm).with_paired_halves() if norms_heads else None,
            key_norm=Norm.of(attention.k_norm).with_paired_halves() if norms_heads else None,
            scaling=attention.scaling,
            output=ready(Linear.of(attention.o_proj)),
            mlp_norm=Norm.of(layer.post_attention_layernorm),
            gate=ready(Linear.of(mlp.gate_proj)),
            up=ready(Linear.of(mlp.up_proj)),
            activation=mlp.act_fn,
            down=ready(Linear.of(mlp.down_proj)),
        )


def rotary_table(model: Any, positions: int) -> Tensor:
    """complex[positions, 1, head_dim / 2]: what a paired head at each position is multiplied by."""
    like = model.model.embed_tokens.weight
    cos, sin = model.model.rotary_emb(like, torch.arange(positions)[None])  # [1, positions, head_dim], halves alike
    half = cos.shape[-1] // 2
    return torch.complex(cos[0, :, None, :half], sin[0, :, None, :half])
