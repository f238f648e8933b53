"""Attention on a CPU: rotary positions with their gradient written out, and short responses over a shared prompt.

Rotary positions: the plain formula q·cos + rotate_half(q)·sin and its gradient pass over queries and keys some twenty
times and copy them to put their halves in order. Written out it is three passes each way, a third of the time in a
small model. Same values, same state dict: only the `forward` of the attention layers in one loaded model is replaced,
and only for passes without a cache.

Short responses: fused kernels work in blocks of dozens of positions; for responses of a few tokens most of a block is
empty, and keys and values of a prompt are copied for each of its responses. `ShortAttention` lets a prompt's keys meet
the queries of all its responses in one product, in two thirds of the fused kernel's time at the demo's size.

Reverse mode, twice too, and forward mode with dual numbers work; the transforms of torch.func do not.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gradtrace.policy.attention import Movement, MoveRows, Rectangle

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


LONGEST = 32
"""Positions of a response from which on the fused kernel is as fast."""


class ShortAttention(torch.autograd.Function):
    """With B prompts × key heads, n responses each, and the r query heads of a key head as further positions:
    queries [B·n, r·L, D], keys and values [B·n, L, D] of the responses and [B, P, D] of the prompts → like queries.

    The biases, 0 or −inf, say who sees whom: own [r·L, L], shared [B or 1, 1, P].
    """

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        prompt_keys: Tensor,
        prompt_values: Tensor,
        own_bias: Tensor,
        prompt_bias: Tensor,
        scale: float,
    ) -> Tensor:
        ctx.biases, ctx.scale = (own_bias, prompt_bias), scale
        weights = attention_weights(queries, keys, prompt_keys, ctx.biases, scale)
        ctx.save_for_backward(queries, keys, values, prompt_keys, prompt_values, weights)
        ctx.save_for_forward(queries, keys, values, prompt_keys, prompt_values, weights)
        return mixed(weights, values, prompt_values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, prompt_keys, prompt_values, weights = ctx.saved_tensors
        if torch.is_grad_enabled():  # this pass will be differentiated: weights move with queries and keys
            weights = attention_weights(queries, keys, prompt_keys, ctx.biases, ctx.scale)
        prompts = len(prompt_keys)
        to_prompt, to_own = parts(weights, prompt_keys)
        gradient = gradient.contiguous()
        by_prompt = gradient.view(prompts, -1, gradient.shape[-1])
        weight_gradient = joined(
            torch.bmm(by_prompt, prompt_values.transpose(1, 2)), torch.bmm(gradient, values.transpose(1, 2))
        )
        scores = torch._softmax_backward_data(weight_gradient, weights, -1, weights.dtype) * ctx.scale
        score_to_prompt, score_to_own = parts(scores, prompt_keys)
        return (
            mixed(scores, keys, prompt_keys),
            torch.bmm(score_to_own.transpose(1, 2), queries),
            torch.bmm(to_own.transpose(1, 2), gradient),
            torch.bmm(score_to_prompt.transpose(1, 2), queries.view(prompts, -1, queries.shape[-1])),
            torch.bmm(to_prompt.transpose(1, 2), by_prompt),
            None,
            None,
            None,
        )

    @staticmethod
    def jvp(
        ctx: Any,
        query_tangent: Tensor | None,
        key_tangent: Tensor | None,
        value_tangent: Tensor | None,
        prompt_key_tangent: Tensor | None,
        prompt_value_tangent: Tensor | None,
        *_: None,
    ) -> Tensor:
        # Scores move by dq·k + q·dk, weights w by w (ds − ⟨w, ds⟩), and the output by dw·v + w·dv.
        queries, keys, values, prompt_keys, prompt_values, weights = ctx.saved_tensors
        if query_tangent is None:
            scores = torch.zeros_like(weights)
        else:
            scores = products(query_tangent.contiguous(), keys, prompt_keys)
        if key_tangent is not None and prompt_key_tangent is not None:
            scores.add_(products(queries, key_tangent, prompt_key_tangent))
        moved = torch._softmax_backward_data(scores.mul_(ctx.scale), weights, -1, weights.dtype)
        output = mixed(moved, values, prompt_values)
        if value_tangent is not None and prompt_value_tangent is not None:
            output.add_(mixed(weights, value_tangent, prompt_value_tangent))
        return output


def products(queries: Tensor, keys: Tensor, prompt_keys: Tensor) -> Tensor:
    """[B·n, r·L, P + L]: ⟨query, key⟩ for every key of the prompt and of the response."""
    by_prompt = queries.view(len(prompt_keys), -1, queries.shape[-1])
    return joined(torch.bmm(by_prompt, prompt_keys.transpose(1, 2)), torch.bmm(queries, keys.transpose(1, 2)))


def attention_weights(
    queries: Tensor, keys: Tensor, prompt_keys: Tensor, biases: tuple[Tensor, Tensor], scale: float
) -> Tensor:
    """[B·n, r·L, P + L]: what each position takes from its prompt and from its own response; rows sum to 1."""
    own_bias, prompt_bias = biases
    by_prompt = queries.view(len(prompt_keys), -1, queries.shape[-1])
    to_prompt = torch.baddbmm(prompt_bias, by_prompt, prompt_keys.transpose(1, 2), alpha=scale)
    to_own = torch.baddbmm(own_bias, queries, keys.transpose(1, 2), alpha=scale)
    return joined(to_prompt, to_own).softmax(-1)


def joined(to_prompt: Tensor, to_own: Tensor) -> Tensor:
    """[B, n·r·L, P] and [B·n, r·L, L] → [B·n, r·L, P + L]."""
    return torch.cat([to_prompt.view(*to_own.shape[:2], -1), to_own], dim=-1)


def parts(both: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
    """The reverse of `joined`, as views; `shared` [B, P, D] is anything of the prompts."""
    prompts, length = shared.shape[:2]
    return both.view(prompts, -1, both.shape[-1])[..., :length], both[..., length:]


def mixed(weights: Tensor, own: Tensor, shared: Tensor) -> Tensor:
    """Σ weight · row, over the rows of the prompt [B, P, D] and of the response [B·n, L, D]."""
    to_prompt, to_own = parts(weights, shared)
    return torch.bmm(to_prompt, shared).view(*to_own.shape[:2], -1).baddbmm_(to_own, own)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """query [G, H, P, D], key and value [G, K, P, D] → like query: every position sees those up to itself.

    For forward mode, where the fused kernel is no choice, and its plain form several times as slow on short rows.
    """
    (groups, heads, length, size), key_heads = query.shape, key.shape[1]
    keys, values = key.reshape(-1, length, size), value.reshape(-1, length, size)
    output = ShortAttention.apply(
        query.reshape(groups * key_heads, -1, size),
        keys,
        values,
        keys[:, :0],
        values[:, :0],
        causal_bias(length, heads // key_heads, query.dtype),
        query.new_zeros(1, 1, 1),
        scale,
    )
    return output.view(query.shape)


def causal_bias(length: int, copies: int, dtype: torch.dtype) -> Tensor:
    """[copies · L, L]: −inf for positions that come later."""
    return torch.full((length, length), -torch.inf, dtype=dtype).triu(1).repeat(copies, 1)


class ShortLayout:
    """Where queries, keys and values of a packed row stand for `ShortAttention`; found once for all layers."""

    def __init__(self, sequences: Rectangle, prefixes: Rectangle) -> None:
        self.sequences = sequences
        self.groups = len(prefixes.mask)
        self.hidden = prefixes.mask.logical_not() if prefixes.into is not None else None
        """bool[G, P]: padding of the prompts."""
        self.movements: dict[tuple[int, int], tuple[Movement, Movement]] = {}

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        prompt_keys: Tensor,
        prompt_values: Tensor,
        scale: float,
    ) -> Tensor:
        """query [s, H, D], key and value [s, K, D] of the responses, [G, K, P, D] of the prompts → [s, H, D]."""
        (heads, size), key_heads, length = query.shape[1:], key.shape[1], self.sequences.mask.shape[1]
        into, out_of = self._movement(heads, key_heads)
        key_into, key_out_of = self._movement(key_heads, key_heads)
        queries = MoveRows.apply(query.reshape(-1, size), into, out_of)
        keys, values = (MoveRows.apply(part.reshape(-1, size), key_into, key_out_of) for part in (key, value))
        shared_bias = query.new_zeros(1, 1, 1)
        if self.hidden is not None:
            visible = torch.zeros(self.hidden.shape, dtype=query.dtype)
            shared_bias = visible.masked_fill(self.hidden, -torch.inf)[:, None].repeat_interleave(key_heads, 0)
        output = ShortAttention.apply(
            queries.view(-1, length * heads // key_heads, size),
            keys.view(-1, length, size),
            values.view(-1, length, size),
            prompt_keys.flatten(0, 1),
            prompt_values.flatten(0, 1),
            causal_bias(length, heads // key_heads, query.dtype),
            shared_bias,
            scale,
        )
        return MoveRows.apply(output.view(-1, size), out_of, into).view(query.shape)

    def _movement(self, heads: int, key_heads: int) -> tuple[Movement, Movement]:
        found = self.movements.get((heads, key_heads))
        if found is None:
            found = self.movements[heads, key_heads] = self.sequences.by_head(self.groups, key_heads, heads)
        return found
