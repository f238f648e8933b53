"""Losses Σ w_t ℓ_t of responses (ℓ_t: a token's log-prob), and the functions that run the model for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gradtrace.algorithms import Denominator, token_weights
from gradtrace.attribution.tangent import at_rest
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.tracin.selector import Loss, Piece
from gradtrace.policy.cpu import accelerated
from gradtrace.policy.microbatch import Layout, MicroBatch, MicroBatches
from gradtrace.policy.policy import Policy

TokenWeights = Callable[[Tensor], Tensor]
"""Response mask bool[R, T] → float[R, T]: how much the loss of each token counts in the loss of the batch."""


@dataclass(frozen=True, eq=False)
class Weighted:
    """Some responses of a batch, and the weight of every token's log-prob in their loss."""

    batch: RolloutBatch
    rows: Tensor
    """long[b]: the responses that count."""
    weights: Tensor
    """float[R, T], for the whole batch."""


def training_losses(batch: RolloutBatch, weigh: TokenWeights) -> Weighted:
    """Every response's own term of the policy gradient; those without an advantage have none and are left out."""
    weights = -batch.need("advantages") * weigh(batch.response_mask)
    if batch.loss_weights is not None:
        weights = weights * batch.loss_weights
    return Weighted(batch, with_advantage(batch), weights)


def validation_losses(batch: RolloutBatch, rows: Tensor | None = None) -> Weighted:
    """L_val = −mean_r(A_r Σ_t ℓ_t) of the whole set, the share of `rows` (all of them by default)."""
    weights = torch.where(batch.response_mask, batch.need("advantages"), 0.0) / -len(batch)
    rows = torch.arange(len(batch)) if rows is None else rows
    counted = rows[(weights[rows] != 0).any(1)]
    # A part of the set without a contrast has a zero gradient; that is no error.
    return Weighted(batch, counted if len(counted) else rows[:1], weights)


def aggregated(aggregation: str, max_response_length: int) -> TokenWeights:
    """The weights of tokens in a batch whose loss is aggregated this way."""
    return lambda mask: token_weights(mask, aggregation, Denominator.of(mask, max_response_length))


def with_advantage(batch: RolloutBatch) -> Tensor:
    """long: the responses with an advantage that is not zero; the others have no gradient."""
    return (batch.need("advantages") != 0).any(1).nonzero().squeeze(-1)


def has_signal(batch: RolloutBatch) -> bool:
    """Whether any response of the batch has a gradient."""
    return len(batch) > 0 and len(with_advantage(batch)) > 0


# ---------------------------------------------------------------- through the model


def response_losses(
    policy: Policy, responses: Weighted, token_budget: int, layout: Layout
) -> Iterator[tuple[Loss, MicroBatch]]:
    """For each micro-batch a function that returns the loss of each of its responses, float[r]."""
    for micro in MicroBatches(responses.batch, token_budget, layout)(responses.rows):
        own = responses.weights[micro.rows, : micro.mask.shape[1]].to(policy.device)

        def losses(micro: MicroBatch = micro, own: Tensor = own) -> Tensor:
            log_probs = micro.unflatten(policy.statistics(micro)[0])
            return (log_probs * at_rest(own)).sum(1)

        yield losses, micro


def total_losses(
    policy: Policy, responses: Weighted, token_budget: int, seen: list[float] | None = None
) -> Iterator[Loss]:
    """For each micro-batch a function that returns the sum of the losses of its responses, and adds each to `seen`."""
    seen = [] if seen is None else seen

    def total(losses: Loss) -> Tensor:
        own = losses()
        seen.extend(own.detach().tolist())
        return own.sum()

    for losses, _ in response_losses(policy, responses, token_budget, policy.best_layout()):
        yield partial(total, losses)


def pieces(policy: Policy, responses: Weighted, token_budget: int, method: str) -> Iterator[Piece]:
    """The responses, ready to be scored by this method."""
    if method == "tangent":  # which needs no positions
        for losses, micro in response_losses(policy, responses, token_budget, policy.best_layout()):
            yield Piece(micro.rows, partial(accelerated_losses, policy, losses))
        return
    for losses, micro in response_losses(policy, responses, token_budget, "padded"):
        yield Piece(micro.rows, losses, micro.response, micro.tokens, policy.seen_by_head(micro))


def accelerated_losses(policy: Policy, losses: Loss) -> Tensor:
    """The losses by the model's faster operations, whose tangents are written out: in forward mode every plain
    operation costs three, and a model that somebody else loaded has plain ones."""
    with accelerated(policy.model):
        return losses()
