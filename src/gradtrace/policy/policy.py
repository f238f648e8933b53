"""The policy being trained: a causal language model, its tokenizer, and log-probs of given responses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from gradtrace.algorithms.logits import log_probs_and_entropies, precise_statistics
from gradtrace.policy.attention import is_supported, packed_attention
from gradtrace.policy.microbatch import InputLayout, MicroBatch


@dataclass
class Policy:
    model: Any
    """A transformers causal LM, or peft's wrapper around one. Weights are float32."""
    device: torch.device
    temperature: float
    """Log-probs and entropies are those of softmax(logits / temperature), the distribution that is sampled."""
    full_precision: bool = field(default=False, kw_only=True)
    """Compute in the precision of the weights: bf16 rounds away what one update changes. Passes without derivatives
    then give float64 statistics."""
    see_logits: Callable[[MicroBatch, Tensor], None] | None = field(default=None, kw_only=True)
    """Called with the logits [N, V] of every pass."""

    def statistics(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probs of the response tokens and entropies of their distributions, both [N], in order."""
        given, micro = micro, micro.to(self.device)
        without_derivatives = not torch.is_grad_enabled() and forward_ad._current_level < 0
        double = self.full_precision and next(self.model.parameters()).dtype == torch.float64
        with KeepDouble() if double else contextlib.nullcontext():
            with self.autocast(), logits_only_at(self.model, micro.logit_positions):
                logits = run_model(self.model, micro).logits[0]
            if self.see_logits is not None:
                self.see_logits(given, logits)
            if self.full_precision and without_derivatives:
                return precise_statistics(logits, micro.targets, self.temperature)
            return log_probs_and_entropies(logits, micro.targets, self.temperature)

    def own_pass(self) -> contextlib.AbstractContextManager[list[Tensor]]:
        """Around a pass whose gradients nobody wants but our hooks. Gives the tensors that it is to be differentiated
        by, so that no gradient of a weight is computed; they are known after the forward pass."""
        return embedding_output(self.model)

    def best_layout(self) -> InputLayout:
        """The layout with the fewest tokens, for passes that nobody listens to layer by layer: prompts computed once
        per group, where the model's attention allows it."""
        # Gradient checkpointing runs the layers again in the backward pass, outside of our attention function.
        sdpa = self.model.config._attn_implementation == "sdpa" and not self.model.is_gradient_checkpointing
        return "shared" if sdpa and is_supported(self.model) else "padded"

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """bf16 matrix products on a GPU; float32 on a CPU."""
        if self.full_precision:
            return torch.autocast(self.device.type, enabled=False)
        return torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda")

    def seen_by_head(self, micro: MicroBatch) -> dict[str, Tensor]:
        """Name of the output head → the flat positions that it runs on, for hooks: it does not see all."""
        head = self.model.get_output_embeddings()
        names = [name for name, module in self.model.named_modules() if module is head]
        return dict.fromkeys(names, micro.logit_positions)

    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}


class KeepDouble(TorchFunctionMode):
    """Inside, whoever asks for float32 gets float64. Models ask for it in their norms and softmaxes, meaning to raise
    half precision; to a float64 model that is a rounding as large as the entropy change of a small step."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {key: torch.float64 if v is torch.float32 else v for key, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


def run_model(model: Any, micro: MicroBatch) -> Any:
    """The model's forward pass on the inputs of a micro-batch, in whatever layout they are."""
    if micro.packing is None:
        return model(input_ids=micro.input_ids, use_cache=False)
    if micro.packing.prefixes is None and model.config._attn_implementation.startswith("flash"):
        # Flash attention reads the borders of packed sequences from the position ids itself.
        return model(input_ids=micro.input_ids, position_ids=micro.position_ids, use_cache=False)
    with packed_attention(model):
        return model(
            input_ids=micro.input_ids,
            position_ids=micro.position_ids,
            packing=micro.packing,
            use_cache=False,
        )


@contextlib.contextmanager
def embedding_output(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collects the outputs of the input embeddings of forward passes inside, made differentiable: where a backward
    pass that wants no weight gradients may end."""
    outputs: list[Tensor] = []
    getter = getattr(model, "get_input_embeddings", None)
    module = getter() if callable(getter) else None
    if module is None:
        yield outputs
        return

    def remember(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        if not output.requires_grad:
            output.requires_grad_()
        outputs.append(output)
        return output

    handle = module.register_forward_hook(remember)
    try:
        yield outputs
    finally:
        handle.remove()


@contextlib.contextmanager
def logits_only_at(model: Any, flat_positions: Tensor) -> Iterator[None]:
    """Inside, lm_head sees hidden states [1, N, H] of these flat positions instead of [B, S, H].

    A vocabulary is many times wider than the model, so logits of prompts and padding would be most of the work.
    The gathering happens before lm_head and not instead of it: what a model does to its logits (scaling,
    soft caps) still happens.
    """

    def gather(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden = inputs[0]
        return (hidden.reshape(-1, hidden.shape[-1]).index_select(0, flat_positions)[None], *inputs[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(gather)
    try:
        yield
    finally:
        handle.remove()


def has_dropout(model: Any) -> bool:
    """Whether passes of training leave out units at random."""
    own = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())
    return own or getattr(model.config, "attention_dropout", 0) > 0
