"""`nn.Embedding(padding_idx=…)`: autograd leaves out the gradient of one row, also where a response holds that token.

So a backward pass is not the derivative of what the model computes, and forward mode is. Instruments need both: the
true derivative of entropy, and the gradient that the optimizer saw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def padded_embeddings(model: nn.Module) -> list[nn.Embedding]:
    """The embeddings that have such a row."""
    return [m for m in model.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None]


@contextmanager
def padding_row_counts(model: nn.Module) -> Iterator[None]:
    """Inside, a backward pass gives the padding row its gradient, too."""
    rows = [(module, module.padding_idx) for module in padded_embeddings(model)]
    try:
        for module, _ in rows:
            module.padding_idx = None
        yield
    finally:
        for module, row in rows:
            module.padding_idx = row


def padding_row_is_constant(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, forward mode leaves the padding row out as a backward pass does."""
    return _padding_replaced(model, [lambda output: output.detach()] * len(padded_embeddings(model)))


def padding_row_stays(model: nn.Module, rows: list[Tensor]) -> AbstractContextManager[None]:
    """Like `padding_row_is_constant`, for weights that are moved and not differentiated: `rows` are the padding rows
    (each [D]) at the weights as they were, in the order of `padded_embeddings`."""
    return _padding_replaced(model, [row.to for row in rows])


@contextmanager
def _padding_replaced(model: nn.Module, by: Sequence[Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Inside, each embedding gives the padding token what its function makes of the embedding's output."""

    def hook_for(replacement: Callable[[Tensor], Tensor]) -> Any:
        def hook(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return torch.where((inputs[0] == module.padding_idx)[..., None], replacement(output), output)

        return hook

    with ExitStack() as stack:
        for module, replacement in zip(padded_embeddings(model), by, strict=True):
            stack.callback(module.register_forward_hook(hook_for(replacement)).remove)
        yield
