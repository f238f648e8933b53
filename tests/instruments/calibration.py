"""A small instrument in one file: how sure the policy was of each response, and of each of its tokens.

Everything that the product knows about it is in `RECORD`; the class writes what the record describes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from gradtrace.algorithms import accepted
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.columns import token_column
from gradtrace.instruments.contract import Reporter, Table
from gradtrace.instruments.record import Record
from gradtrace.trace.columns import COLUMNS, KINDS, Column, InstrumentRecord, register_instrument
from gradtrace.trace.writer import TraceWriter

RECORD = InstrumentRecord(
    name="calibration",
    label="Calibration",
    meaning="how sure the policy was of its answers",
    brings=(
        Column("confidence", "float32", "response", "mean probability of its tokens", unit="probability"),
        Column("probability", "float32", "token", "probability of the token", unit="of 1", channel="Probability"),
    ),
    required=("confidence", "probability"),
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


class Calibration(Reporter):
    def __init__(self, run_dir: Path) -> None:
        self.record = Record(RECORD, None, TraceWriter(run_dir, RECORD.name, on_error="raise"))

    def write(self, batch: RolloutBatch, step: int, table: Table | None) -> dict[str, float]:
        rows = torch.arange(len(batch))
        probability = np.exp(token_column(batch.need("old_log_probs"), batch, rows))
        ends = np.cumsum(batch.response_lengths.numpy())
        confidence = np.array([part.mean() for part in np.split(probability, ends[:-1])], np.float32)
        good = accepted(batch.need("rewards"), batch.group).numpy()
        brier = float(((confidence - good) ** 2).mean())
        columns = {"probability": probability, "confidence": confidence}
        self.record.write(step, batch, rows, columns, {"brier": brier})
        return {"calibration/brier": brier}

    def close(self) -> None:
        self.record.close()
