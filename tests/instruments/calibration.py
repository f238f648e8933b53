"""A small instrument in one file: how sure the policy was of each response, and of each of its tokens.

Everything that the product knows about it is in `RECORD`; the class writes what the record describes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from gradtrace.batch import RolloutBatch
from gradtrace.instruments.columns import group_columns, response_columns, token_column
from gradtrace.instruments.observer import StepObserver
from gradtrace.trace.kinds.shared import EVERY_KIND
from gradtrace.trace.record import COLUMNS, KINDS, Column, InstrumentRecord, register_instrument
from gradtrace.trace.writer import TraceWriter

RECORD = InstrumentRecord(
    name="calibration",
    label="Calibration",
    meaning="how sure the policy was of its answers",
    switch="trainer.calibration.enable=true",
    brings=(
        Column("confidence", "float32", "response", "mean probability of its tokens", unit="probability"),
        Column("probability", "float32", "token", "probability of the token", ragged_by="token_offsets"),
    ),
    required=(*EVERY_KIND, "confidence", "probability"),
    optional=("accepted", "advantage", "expected_offsets", "expected_ids", "first_wrong"),
    meta={"brier": "mean squared distance of confidence and acceptance"},
)


def register() -> None:
    register_instrument(RECORD)


def forget() -> None:
    """Other tests in this process look at the instruments that ship."""
    del KINDS[RECORD.name]
    for column in RECORD.brings:
        del COLUMNS[column.name]


class Calibration(StepObserver):
    def __init__(self, run_dir: Path) -> None:
        self.writer = TraceWriter(run_dir, RECORD.name, on_error="raise")

    def after_update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        assert batch.old_log_probs is not None
        rows = torch.arange(len(batch))
        columns = {**group_columns(batch), **response_columns(batch, rows)}
        probability = np.exp(token_column(batch.old_log_probs, batch, rows))
        ends = np.cumsum(columns["length"])
        confidence = np.array([part.mean() for part in np.split(probability, ends[:-1])], np.float32)
        brier = float(((confidence - columns["accepted"]) ** 2).mean())
        columns |= {"probability": probability, "confidence": confidence}
        self.writer.write(step, columns, {"brier": brier})
        return {"calibration/brier": brier}

    def close(self) -> None:
        self.writer.close()
