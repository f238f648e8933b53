"""The entropy trace: entropy and log-prob of every token of a rollout batch, at the weights that sampled it."""

from __future__ import annotations

from typing import Any

import torch

from gradtrace.batch import RolloutBatch
from gradtrace.instruments.columns import log_prob_columns, reward_part_columns
from gradtrace.instruments.contract import Reporter, Table, TrainingRun
from gradtrace.instruments.record import Record


class EntropyReporter(Reporter):
    """Asks for entropies only in the steps that it writes."""

    def __init__(self, record: Record, run: TrainingRun | None = None) -> None:
        self.record = record

    def needs_entropies(self, step: int) -> bool:
        return bool(step % self.record.settings.write_every == 0)

    def write(self, batch: RolloutBatch, step: int, table: Table | None) -> dict[str, float]:
        if self.needs_entropies(step):
            self.record.write(step, batch, torch.arange(len(batch)), entropy_columns(batch), {})
        return {"entropy_trace/write_errors": self.record.write_errors}


def entropy_columns(batch: RolloutBatch) -> dict[str, Any]:
    """The columns beside those that every file has."""
    rows = torch.arange(len(batch))
    batch.need("entropies"), batch.need("old_log_probs")
    return log_prob_columns(batch, rows) | reward_part_columns(batch, rows)
