"""Decoding with a compiled model: on a GPU one CUDA graph per step, instead of hundreds of launches by the host.

A graph is replayed on the same shapes and addresses, so nothing here changes its size: the cache has its slots from the
start, and a row that has ended keeps its place and is computed on, unread.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from gradtrace.errors import GradtraceError
from gradtrace.rollout.decoder import ModelForward, Prompts, without_adapters

SLOTS = 64
"""Caches are as long as a multiple of this: few different shapes, so that few graphs are compiled."""


class CompiledModel:
    """The model's forward pass for one token per row, compiled at its first call for each shape."""

    def __init__(self, model: Any, backend: str = "inductor") -> None:
        inner = without_adapters(model)
        if not getattr(inner, "_can_compile_fullgraph", False):
            raise GradtraceError(
                f"rollout.compile=true: {type(inner).__name__} does not say that it can be compiled whole. "
                "Use rollout.compile=false."
            )
        on_gpu = next(model.parameters()).device.type == "cuda"
        # `reduce-overhead` is torch's name for CUDA graphs.
        mode = "reduce-overhead" if on_gpu and backend == "inductor" else None
        self.forward = torch.compile(model.forward, mode=mode, dynamic=False, backend=backend)

    def __call__(self, ids: Tensor, positions: Tensor, mask: Tensor, cache: StaticCache) -> Tensor:
        """Logits [B, V] of the tokens that follow. They are overwritten by the next call."""
        torch.compiler.cudagraph_mark_step_begin()
        output = self.forward(
            input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
        )
        return output.logits[:, -1]


class CompiledDecoder:
    """See `Decoder`. Prompts are read by the model as it is: they come in too many lengths to compile each."""

    def __init__(
        self, model: Any, prompts: Prompts, row_prompts: Tensor, max_new_tokens: int, compiled: CompiledModel
    ) -> None:
        """`row_prompts` long[B]: the prompt of each row."""
        slots = -(-(prompts.longest + max_new_tokens) // SLOTS) * SLOTS
        mask = prompts.mask()
        logits, read = ModelForward(model)(prompts.ids, prompts.positions(), mask, None)
        read.reorder_cache(row_prompts)
        self.cache = StaticCache(config=without_adapters(model).config, max_cache_len=slots)
        for index, layer in enumerate(read.layers):
            self.cache.update(layer.keys, layer.values, index)
        self.first_logits = logits[row_prompts]
        self.compiled = compiled
        self.positions = prompts.lengths[row_prompts][:, None].clone()
        self.tokens = torch.zeros_like(self.positions)
        self.rows = torch.arange(len(row_prompts), device=row_prompts.device)
        """long[b]: the places of the rows that are still sampled."""
        self.mask = torch.ones(len(row_prompts), slots, dtype=torch.bool, device=row_prompts.device)
        if mask is not None:
            self.mask[:, : prompts.longest] = mask[row_prompts]

    def step(self, tokens: Tensor) -> Tensor:
        self.tokens[self.rows, 0] = tokens
        logits = self.compiled(self.tokens, self.positions, self.mask, self.cache)
        self.positions += 1
        return logits[self.rows]

    def keep(self, rows: Tensor) -> None:
        self.rows = self.rows[rows]
