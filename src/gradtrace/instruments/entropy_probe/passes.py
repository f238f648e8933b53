"""What the probe asks of a batch: forward passes that give numbers per token, a micro-batch at a time.

Your own loop needs no more than this: a `TokenBatch` whose passes run your model. `evaluation_batch` and `update_batch`
make them from a `RolloutBatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradtrace.algorithms import Denominator, token_weights
from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.instruments.contract import Gradient
from gradtrace.policy.loss import PolicyLoss
from gradtrace.policy.microbatch import MicroBatch, MicroBatches
from gradtrace.policy.policy import Policy
from gradtrace.terminal import Progress


@dataclass(frozen=True, eq=False)
class Pass:
    """One forward pass of the model."""

    rows: Tensor
    """long[r]: the sequences of the batch in it."""
    run: Callable[[], Tensor]
    """Runs the model at its current weights. Evaluation batch: [2, n], log-probs and entropies of the n tokens of
    `rows`, in order. Update batch: [n], each token's own term of the loss, normaliser included; their
    sum is the loss."""


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """R sequences in passes small enough for memory; every sequence is in one pass."""

    lengths: Tensor
    """long[R]: tokens of each sequence, at least one."""
    group: Tensor
    """long[R]: the prompt of each; sequences of one prompt are not independent of each other."""
    passes: Callable[[], Iterable[Pass]]
    """Called once for every sweep over the batch; always the same passes."""
    gradient: Callable[[Tensor], Gradient] | None = None
    """Weights w [R] of sequences → the gradient of Σ_k (H_k + w ℓ_k) over their tokens, and over all ranks; None: by
    autograd over `passes`."""

    def __post_init__(self) -> None:
        empty = (self.lengths < 1).nonzero().flatten().tolist()
        if empty:
            raise GradtraceError(
                f"sequence {empty[0]} of the batch has no tokens ({len(empty)} such): an empty response has no entropy "
                "and no loss; remove it"
            )

    def collect(self, values_of: Callable[[Pass], Tensor], progress: Progress | None = None) -> Tensor:
        """Numbers per token of all passes, [..., N] in the order of the sequences, on the CPU, in float64."""
        found: dict[int, Tensor] = {}
        nothing = torch.empty(0, dtype=torch.float64)
        for one in self.passes():
            values = values_of(one).detach().cpu().double()
            nothing = values[..., :0]
            found.update(zip(one.rows.tolist(), values.split(self.lengths[one.rows].tolist(), dim=-1), strict=True))
            if progress is not None:
                progress(len(found), len(self.lengths))
        return torch.cat([nothing, *(found[row] for row in range(len(self.lengths)))], dim=-1)


def precise(policy: Policy) -> Policy:
    """The policy in the precision of its weights: bf16 rounds away the changes that the probe measures."""
    return Policy(policy.model, policy.device, policy.temperature, full_precision=True)


def evaluation_batch(policy: Policy, batch: RolloutBatch, token_budget: int = 16384) -> TokenBatch:
    """E: log-probs and entropies of the responses, `token_budget` tokens (padding counted) in a pass."""
    exact = precise(policy)

    def one(micro: MicroBatch) -> Pass:
        return Pass(micro.rows, lambda: torch.stack(exact.statistics(micro)))

    return TokenBatch(batch.written_counts, batch.group, _passes(batch, token_budget, one))


def update_batch(loss: PolicyLoss, batch: RolloutBatch, token_budget: int = 16384) -> TokenBatch:
    """U: terms of the configured loss, all rows of `batch` in one optimizer step. Old log-probs must be set."""
    micro_batches = MicroBatches(batch, token_budget)
    denominator = Denominator.of(batch.response_mask, loss.max_response_length)

    def one(micro: MicroBatch) -> Pass:
        def terms() -> Tensor:
            losses = loss.token_losses(batch, micro_batches, micro.rows)
            weights = token_weights(micro.mask, loss.algorithm.aggregation, denominator, losses.dtype)
            return losses * weights[micro.mask].to(losses.device)

        return Pass(micro.rows, terms)

    return TokenBatch(batch.written_counts, batch.group, _passes(batch, token_budget, one))


def _passes(batch: RolloutBatch, token_budget: int, one: Callable[[MicroBatch], Pass]) -> Callable[[], Iterator[Pass]]:
    micro_batches = MicroBatches(batch, token_budget)
    return lambda: (one(micro) for micro in micro_batches(torch.arange(len(batch))))


def gradient_of(
    model: nn.Module,
    batch: TokenBatch,
    objective: Callable[[Tensor, Tensor], Tensor],
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """The gradient of `objective(rows, values)`, summed over the passes; parameters that it does not reach are left
    out."""
    found: dict[str, Tensor] = {}
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    done = 0
    for one in batch.passes():
        with torch.enable_grad():
            value = objective(one.rows, one.run())
        if not value.requires_grad:
            raise GradtraceError(
                "the loss does not depend on any trainable parameter: is the model run under no_grad, or are its "
                "outputs detached?"
            )
        gradients = torch.autograd.grad(value, list(trainable.values()), allow_unused=True)
        for name, gradient in zip(trainable, gradients, strict=True):
            if gradient is not None:
                found[name] = found[name].add_(gradient) if name in found else gradient.clone()
        done += len(one.rows)
        if progress is not None:
            progress(done, len(batch.lengths))
    if not found:
        raise GradtraceError("the loss does not reach any of the model's trainable parameters")
    return found
