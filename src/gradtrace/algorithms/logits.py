"""Log-probs of given tokens and entropies, from logits, without further copies of the [N, V] tensor.

Plain tensor operations make autograd keep one to four [N, V] tensors for the backward pass, more than
all else in a small model. Here the backward pass computes the softmax again from the logits, which are alive
anyway, a block of rows at a time; only the gradient itself is allocated. Half-precision logits are raised to
float32 block by block. Reverse mode, forward mode (jvp) and second derivatives work; vmap does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# Elements of the largest temporary. On CPU a block should stay in the cache; a GPU wants larger kernels.
BLOCK_ELEMENTS_CPU = 2**19
BLOCK_ELEMENTS_GPU = 2**25
# exp of this is zero even in float64, and 0 · FLOOR is 0 where 0 · −inf, of a forbidden token, would be NaN.
FLOOR = -1e4


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Slices over the rows of logits [N, V]."""
    elements = BLOCK_ELEMENTS_CPU if logits.device.type == "cpu" else BLOCK_ELEMENTS_GPU
    rows = max(1, elements // max(1, logits.shape[1]))
    for start in range(0, logits.shape[0], rows):
        yield slice(start, start + rows)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """[n, V], in float32 at least."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    scaled = logits if temperature == 1.0 else logits.to(dtype) / temperature
    return torch.log_softmax(scaled, -1, dtype=dtype)


def _entropy(p: Tensor, log_p: Tensor) -> Tensor:
    return -torch.linalg.vecdot(p, log_p)


class _TokenStatistics(torch.autograd.Function):
    """(logits [N, V], tokens [N]) → log_probs [N], entropies [N] (of length 0 unless asked for)."""

    @staticmethod
    def forward(logits: Tensor, tokens: Tensor, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor]:
        log_probs, entropies = [], []
        for rows in _blocks(logits):
            log_p = _log_softmax(logits[rows], temperature)
            log_probs.append(log_p.gather(-1, tokens[rows].unsqueeze(-1)).squeeze(-1))
            if with_entropy:
                log_p = log_p.clamp_(min=FLOOR)
                entropies.append(_entropy(log_p.exp(), log_p))
        empty = logits.new_empty(0, dtype=torch.promote_types(logits.dtype, torch.float32))
        return torch.cat(log_probs or [empty]), torch.cat(entropies or [empty])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        # Only inputs are saved: differentiating the backward pass then sees everything that depends on them.
        logits, tokens, ctx.temperature, ctx.with_entropy = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, tokens)
        ctx.save_for_forward(logits, tokens)

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        # With z = logits / temperature: ∂log p_t/∂z = onehot_t − p and ∂H/∂z = −p (log p + H).
        logits, tokens = ctx.saved_tensors
        if not ctx.with_entropy:
            grad_entropies = None
        if grad_log_probs is None and grad_entropies is None:
            return None, None, None, None
        gradient = torch.empty_like(logits)
        for rows in _blocks(logits):
            log_p = _log_softmax(logits[rows], ctx.temperature).clamp(min=FLOOR)
            p = log_p.exp()
            pull: Tensor | float = 0.0
            if grad_log_probs is not None:
                pull = grad_log_probs[rows].unsqueeze(-1)
            if grad_entropies is not None:
                bracket = log_p + _entropy(p, log_p).unsqueeze(-1)
                pull = pull + bracket * grad_entropies[rows].unsqueeze(-1)
            block = p * -pull
            if grad_log_probs is not None:
                block.scatter_add_(-1, tokens[rows].unsqueeze(-1), grad_log_probs[rows].unsqueeze(-1))
            gradient[rows] = block if ctx.temperature == 1.0 else block / ctx.temperature
        return gradient, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> tuple[Tensor, Tensor | None]:
        logits, tokens = ctx.saved_tensors
        log_probs, entropies = [], []
        for rows in _blocks(logits):
            log_p = _log_softmax(logits[rows], ctx.temperature).clamp(min=FLOOR)
            p = log_p.exp()
            direction = tangent[rows].to(p.dtype) / ctx.temperature
            mean = torch.linalg.vecdot(p, direction)
            log_probs.append(direction.gather(-1, tokens[rows].unsqueeze(-1)).squeeze(-1) - mean)
            if ctx.with_entropy:
                entropies.append(-torch.linalg.vecdot(p * log_p, direction) - _entropy(p, log_p) * mean)
        empty = tangent.new_empty(0, dtype=torch.promote_types(logits.dtype, torch.float32))
        return torch.cat(log_probs or [empty]), torch.cat(entropies or [empty])


def _statistics(logits: Tensor, tokens: Tensor, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor]:
    if tokens.shape != logits.shape[:-1]:
        raise ValueError(f"tokens {tuple(tokens.shape)} and logits {tuple(logits.shape)} must be [...] and [..., V]")
    flat = logits.reshape(-1, logits.shape[-1])
    log_probs, entropies = _TokenStatistics.apply(flat, tokens.reshape(-1), temperature, with_entropy)
    return log_probs.view(tokens.shape), entropies.view(tokens.shape) if with_entropy else entropies


@torch.no_grad()
def precise_statistics(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return what `log_probs_and_entropies` does of logits [N, V], as float64[N]: for differences between passes.

    float32 rounds log p by 1e-7, which is all that a small step does to a token with p near 1. Here differences to the
    largest logit are taken first and summed up in float64; the logits themselves stay float32.
    """
    log_probs, entropies = [], []
    for rows in _blocks(logits):
        block = logits[rows].to(torch.promote_types(logits.dtype, torch.float32))
        shifted = ((block - block.amax(-1, keepdim=True)) / temperature).clamp_(min=FLOOR)
        weights = shifted.exp()
        total = weights.sum(-1, dtype=torch.float64)
        log_probs.append(shifted.gather(-1, tokens[rows].unsqueeze(-1)).squeeze(-1).double() - total.log())
        entropies.append(total.log() - torch.linalg.vecdot(weights, shifted).double() / total)
    empty = torch.empty(0, dtype=torch.float64, device=logits.device)
    return torch.cat(log_probs or [empty]), torch.cat(entropies or [empty])


def log_probs_from_logits(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """[...] log-probs of `tokens` [...] under softmax(logits / temperature), logits [..., V]."""
    return _statistics(logits, tokens, temperature, with_entropy=False)[0]


def log_probs_and_entropies(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """[...] log-probs of `tokens` and [...] entropies in nats, from one softmax."""
    return _statistics(logits, tokens, temperature, with_entropy=True)


def entropy_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """[...] entropies in nats of softmax(logits / temperature), logits [..., V]."""
    tokens = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    return _statistics(logits, tokens, temperature, with_entropy=True)[1]
