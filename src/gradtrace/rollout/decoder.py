"""One chunk of rows being decoded: the prompts' keys and values, and one more token per row at each step."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import StaticCache

from gradtrace.errors import GradtraceError


class Decoder(Protocol):
    """Prompts are read once, when it is made; then rows (responses) advance together, one token a step."""

    first_logits: Tensor
    """float[B, V]: the logits of every row's first token."""

    def step(self, tokens: Tensor) -> Tensor:
        """Append tokens long[B] to the rows; the logits [B, V] of the tokens that follow."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Row i becomes what was row rows[i] (long[k], k <= B); the rest leave the batch."""
        ...


class Prompts:
    """Prompts of different lengths as one left-padded rectangle, so that all rows write the same cache slot."""

    def __init__(self, prompts: list[list[int]], device: torch.device) -> None:
        longest = max(len(prompt) for prompt in prompts)
        # Padding is masked; the first token is a valid id everywhere, which a tokenizer's pad token may not be.
        padded = [prompt[:1] * (longest - len(prompt)) + prompt for prompt in prompts]
        self.ids = torch.tensor(padded, device=device)
        """long[P, L]."""
        self.lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        """long[P]."""
        self.longest = longest
        self._prompts = prompts

    def mask(self) -> Tensor | None:
        """bool[P, L], True for real tokens; None when nothing is padded, which spares the model its masks."""
        if bool((self.lengths == self.longest).all()):
            return None
        slots = torch.arange(self.longest, device=self.ids.device)
        return slots >= (self.longest - self.lengths)[:, None]

    def positions(self) -> Tensor:
        """long[P, L]: 0 for the first real token (and for the padding before it)."""
        slots = torch.arange(self.longest, device=self.ids.device)
        return (slots - (self.longest - self.lengths)[:, None]).clamp_(min=0)

    def readers(self) -> tuple[Prompts, Tensor]:
        """The prompts that no other one goes on from, and for each of ours the one of them that it begins (long[P]):
        reading these reads all."""
        chosen: list[int] = []
        reader = [0] * len(self._prompts)
        # In this order a prompt comes just before those that go on from it.
        for index in sorted(range(len(reader)), key=self._prompts.__getitem__, reverse=True):
            own = self._prompts[index]
            if not chosen or self._prompts[chosen[-1]][: len(own)] != own:
                chosen.append(index)
            reader[index] = chosen[-1]
        place = {index: number for number, index in enumerate(sorted(chosen))}
        device = self.ids.device
        found = torch.tensor([place[index] for index in reader], device=device)
        return Prompts([self._prompts[index] for index in place], device), found


def without_adapters(model: Any) -> Any:
    """The transformers model inside of peft's wrapper (its layers still hold the adapters), or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class ModelForward:
    """Calls a causal LM with the arguments that it understands."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.accepted = set(inspect.signature(without_adapters(model).forward).parameters)

    def __call__(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Any) -> tuple[Tensor, Any]:
        """Logits [B, V] of the last position, and the cache."""
        arguments: dict[str, Any] = {"position_ids": positions, "logits_to_keep": 1}
        arguments = {name: value for name, value in arguments.items() if name in self.accepted}
        output = self.model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **arguments)
        if output.past_key_values is None:
            raise GradtraceError(
                f"{type(self.model).__name__} returns no key-value cache; the sampler needs a causal language "
                "model that supports `use_cache=True`"
            )
        return output.logits[:, -1], output.past_key_values


class ModelDecoder:
    """Decodes with the model's own forward and its own kind of cache: right for every architecture."""

    def __init__(self, model: Any, prompts: Prompts, row_prompts: Tensor, max_new_tokens: int) -> None:
        """`row_prompts` long[B]: the prompt of each row."""
        self.forward = ModelForward(model)
        mask = prompts.mask()
        logits, self.cache = self.forward(prompts.ids, prompts.positions(), mask, None)
        self.cache.reorder_cache(row_prompts)
        self.first_logits = logits[row_prompts]
        self.positions = prompts.lengths[row_prompts]
        self.filled = prompts.longest
        self.mask = None
        if mask is not None:
            generated = torch.ones(len(row_prompts), max_new_tokens, dtype=torch.bool, device=mask.device)
            self.mask = torch.cat([mask[row_prompts], generated], dim=1)

    def step(self, tokens: Tensor) -> Tensor:
        self.filled += 1
        mask = None if self.mask is None else self.mask[:, : self.filled]
        logits, self.cache = self.forward(tokens[:, None], self.positions[:, None], mask, self.cache)
        self.positions = self.positions + 1
        return logits

    def keep(self, rows: Tensor) -> None:
        self.cache.reorder_cache(rows)
        self.positions = self.positions[rows]
        if self.mask is not None:
            self.mask = self.mask[rows]


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
    """Decodes with a compiled model: on a GPU one CUDA graph per step, instead of hundreds of launches by the host.

    A graph is replayed on the same shapes and addresses, so nothing here changes its size: the cache has its slots
    from the start, and a row that has ended keeps its place and is computed on, unread. Prompts are read by the model
    as it is: they come in too many lengths to compile each.
    """

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
