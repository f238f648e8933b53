"""Entropy trace: entropy and log-prob of every token of a rollout batch, at the weights that sampled it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gradtrace.batch import RolloutBatch
from gradtrace.instruments.columns import (
    Truth,
    group_columns,
    log_prob_columns,
    no_truth,
    response_columns,
    reward_part_columns,
)
from gradtrace.instruments.observer import WritingObserver
from gradtrace.trace.writer import TraceWriter


@dataclass(eq=False)
class EntropyTrace(WritingObserver):
    """Writes every `write_every` steps; asks the loop for entropies in those steps only."""

    writer: TraceWriter
    write_every: int
    meta: dict[str, Any]
    truth: Truth = no_truth

    def before_update(self, batch: RolloutBatch, step: int) -> RolloutBatch:
        self.needs_entropies = step % self.write_every == 0
        return batch

    def after_update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        if step % self.write_every == 0:
            self.writer.write(step, entropy_columns(batch, self.truth), self.meta)
        return {"entropy_trace/write_errors": float(self.writer.stats.failed)}


def entropy_columns(batch: RolloutBatch, truth: Truth = no_truth) -> dict[str, Any]:
    rows = torch.arange(len(batch))
    batch.need("entropies"), batch.need("old_log_probs")
    return {
        **group_columns(batch, truth),
        **response_columns(batch, rows, truth),
        **log_prob_columns(batch, rows),
        **reward_part_columns(batch, rows),
    }
