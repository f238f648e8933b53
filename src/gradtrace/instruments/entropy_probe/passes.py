"""What the probe asks of a batch: forward passes that give numbers per token, a micro-batch at a time.

Your own loop needs no more than this: a `TokenBatch` whose passes run your model. `evaluation_batch` and `update_batch`
make them from a `RolloutBatch`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradtrace.algorithms import Denominator, token_weights
from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.policy.loss import PolicyLoss
from gradtrace.policy.microbatch import MicroBatch, MicroBatches
from gradtrace.policy.policy import Policy

Progress = Callable[[int, int], None]
"""(sequences done, sequences in all)."""


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

    def __post_init__(self) -> None:
        empty = (self.lengths < 1).nonzero().flatten().tolist()
        if empty:
            raise GradtraceError(
                f"sequence {empty[0]} of the batch has no tokens ({len(empty)} such): an empty response has no entropy "
                "and no loss; remove it"
            )

    def collect(self, values_of: Callable[[Pass], Tensor], progress: Progress | None = None) -> Tensor:
        """Numbers per token of all passes, [..., N] in the order of the sequences, on the CPU, in float64."""
        offsets = self.lengths.cumsum(0) - self.lengths
        result: Tensor | None = None
        done = 0
        for one in self.passes():
            values = values_of(one).detach().cpu().double()
            if result is None:
                result = values.new_full((*values.shape[:-1], int(self.lengths.sum())), torch.nan)
            places = [torch.arange(int(self.lengths[r])) + offsets[r] for r in one.rows.tolist()]
            result[..., torch.cat([torch.empty(0, dtype=torch.long), *places])] = values
            done += len(one.rows)
            if progress is not None:
                progress(done, len(self.lengths))
        assert result is not None
        return result


class KeepDouble(TorchFunctionMode):
    """Inside, whoever asks for float32 gets float64. Models ask for it in their norms and softmaxes, meaning to raise
    half precision; to a float64 model that is a rounding as large as the entropy change of a small step."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {key: torch.float64 if v is torch.float32 else v for key, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


class FullPrecision(Policy):
    """The policy in the precision of its weights: bf16 rounds away the changes that the probe measures."""

    def statistics(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        double = next(self.model.parameters()).dtype == torch.float64
        with KeepDouble() if double else contextlib.nullcontext():
            return super().statistics(micro)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, enabled=False)

    @staticmethod
    def of(policy: Policy) -> FullPrecision:
        return FullPrecision(policy.model, policy.device, policy.temperature)


def evaluation_batch(policy: Policy, batch: RolloutBatch, token_budget: int = 16384) -> TokenBatch:
    """E: log-probs and entropies of the responses, `token_budget` tokens (padding counted) in a pass."""
    exact = FullPrecision.of(policy)

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
