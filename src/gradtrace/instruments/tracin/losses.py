"""Losses of responses as functions that run the model, micro-batch by micro-batch, as TracIn scores need them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.instruments.tracin.selector import Loss, Piece
from gradtrace.policy.microbatch import MicroBatch, MicroBatches
from gradtrace.policy.packed_attention import is_supported
from gradtrace.policy.policy import Policy


def response_losses(
    policy: Policy, batch: RolloutBatch, rows: Tensor, weights: Tensor, token_budget: int, layout: str
) -> Iterator[tuple[Loss, MicroBatch]]:
    """Functions that return Σ_t weights·ℓ_t of each response of a micro-batch, float[r]; `weights` is float[R, T]."""
    for micro in MicroBatches(batch, token_budget, layout)(rows):
        own = weights[micro.rows, : micro.mask.shape[1]].to(policy.device)

        def losses(micro: MicroBatch = micro, own: Tensor = own) -> Tensor:
            log_probs = micro.unflatten(policy.statistics(micro)[0])
            return (log_probs * own).sum(1)

        yield losses, micro


def total_losses(
    policy: Policy, batch: RolloutBatch, rows: Tensor, weights: Tensor, token_budget: int, layout: str
) -> Iterator[Loss]:
    """The same, added up over the responses of each micro-batch."""
    for losses, _ in response_losses(policy, batch, rows, weights, token_budget, layout):
        yield lambda losses=losses: losses().sum()  # type: ignore[misc]


def pieces(
    policy: Policy, batch: RolloutBatch, rows: Tensor, weights: Tensor, token_budget: int, layout: str
) -> Iterator[Piece]:
    """The responses `rows`, ready to be scored by either method."""
    head = policy.model.get_output_embeddings()
    heads = [name for name, module in policy.model.named_modules() if module is head]
    for losses, micro in response_losses(policy, batch, rows, weights, token_budget, layout):
        positions = dict.fromkeys(heads, micro.logit_positions)
        yield Piece(micro.rows, losses, micro.response, micro.tokens, positions)


def best_layout(policy: Policy, method: str) -> str:
    """Prompts computed once per group where nothing but losses is wanted and the model's attention allows it."""
    model = policy.model
    # Gradient checkpointing runs the layers again in the backward pass, outside of our attention function.
    allowed = model.config._attn_implementation == "sdpa" and not model.is_gradient_checkpointing
    return "shared" if method == "tangent" and allowed and is_supported(model) else "padded"


def with_advantage(batch: RolloutBatch) -> Tensor:
    """long: the responses with an advantage that is not zero; the others have no gradient."""
    assert batch.advantages is not None
    return (batch.advantages != 0).any(1).nonzero().squeeze(-1)


def has_signal(batch: RolloutBatch) -> bool:
    return len(batch) > 0 and len(with_advantage(batch)) > 0


def validation_weights(batch: RolloutBatch) -> Tensor:
    """float[R, T]: of the log-probs in L_val = −mean_r(A_r Σ_t ℓ_t)."""
    assert batch.advantages is not None
    return torch.where(batch.response_mask, batch.advantages, 0.0) / -len(batch)
