"""Rotary positions with their gradient written out, for training on a CPU.

The plain formula q·cos + rotate_half(q)·sin and its gradient pass over queries and keys some twenty times and copy
them to put their halves in order. Written out it is three passes each way, a third of the time in a small model. Same
values, same state dict: only the `forward` of the attention layers in one loaded model is replaced, and only for
passes without a cache. Reverse mode, twice too, and forward mode with dual numbers work; the transforms of torch.func
do not.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

SAME_FORMULA = ("LlamaAttention", "MistralAttention", "Qwen2Attention")
"""Attention layers of transformers that project, rotate queries and keys, and attend; nothing else."""


class Rotate(torch.autograd.Function):
    """(x [..., D], cos, sin: broadcast to it) → x·cos + rotate_half(x)·sin."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.save_for_forward(cos, sin)
        half = x.shape[-1] // 2
        turned = x * cos
        turned[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
        turned[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return turned

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # The transposed map is a rotation too: the sines change sides, and their sign.
        cos, sin = ctx.saved_tensors
        return Rotate.apply(gradient, cos, -sin.roll(sin.shape[-1] // 2, -1)), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return Rotate.apply(tangent, *ctx.saved_tensors)


def _forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    implementation = self.config._attn_implementation
    if past_key_values is not None or implementation not in ALL_ATTENTION_FUNCTIONS:
        # With a cache, and in transformers' eager attention, which each model file has for itself.
        return type(self).forward(
            self,
            hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            **options,
        )
    cos, sin = (table.unsqueeze(2) for table in position_embeddings)  # [B, S, 1, D]
    query, key, value = (
        project(hidden_states).unflatten(-1, (-1, self.head_dim))  # [B, S, H, D]
        for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    query, key = Rotate.apply(query, cos, sin), Rotate.apply(key, cos, sin)
    output, weights = ALL_ATTENTION_FUNCTIONS[implementation](
        self,
        *(heads.transpose(1, 2) for heads in (query, key, value)),
        attention_mask,
        dropout=self.attention_dropout if self.training else 0.0,
        scaling=self.scaling,
        sliding_window=_window(self),
        **options,
    )
    return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights


def _window(attention: Any) -> int | None:
    """How far back the layer looks: Mistral says it in the config, Qwen2 layer by layer, Llama not at all."""
    place = attention.config if type(attention).__name__ == "MistralAttention" else attention
    return getattr(place, "sliding_window", None)


_forward.computes_the_same = True  # type: ignore[attr-defined]  # so that the sampler keeps its fast path


def use_fast_rotation(model: nn.Module) -> None:
    """Replace the forward of every attention layer of known formula, unless somebody did so before; float32 on a CPU
    only, where it pays."""
    for module in model.modules():
        if type(module).__name__ in SAME_FORMULA and "forward" not in vars(module):
            weight: Any = module.q_proj.weight  # type: ignore[union-attr]
            if weight.device.type == "cpu" and weight.dtype == torch.float32:
                module.forward = MethodType(_forward, module)
