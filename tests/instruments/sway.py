"""A whole instrument in one file, as an installed package brings it: how far each optimizer step moves each token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gradtrace.batch import RolloutBatch
from gradtrace.instruments import registry
from gradtrace.instruments.columns import with_gaps
from gradtrace.instruments.contract import Host, Instrument, Observer, OptimizerStep, Reporter, Table, TrainingRun
from gradtrace.instruments.record import Record
from gradtrace.instruments.settings import TraceConfig
from gradtrace.trace.columns import COLUMNS, EVERY_KIND, KINDS, Column, InstrumentRecord

RECORD = InstrumentRecord(
    name="sway",
    label="Sway",
    meaning="how far this step moves each token",
    required=(*EVERY_KIND, "sway"),
    optional=("accepted", "advantage"),
    brings=(
        Column(
            "sway",
            "float32",
            "token",
            "change of its log-prob by a plain gradient step",
            unit="nats",
            is_signed=True,
            channel="Sway",
        ),
    ),
)


@dataclass
class SwaySettings(TraceConfig):
    pass


class SwayObserver(Observer):
    def __init__(self, host: Host, settings: Any) -> None:
        self.host = host

    def before_step(self, update: OptimizerStep) -> None:
        rows, coming = self.host.own(update), self.host.next_gradient()
        assert coming is not None
        with self.host.aside(), self.host.padding_held():
            found = self.host.derivative(lambda: self.host.values(rows, lambda one: one.log_probs), coming.values)
        self.table.put("sway", rows.split(-found.double() / coming.clip_factor))


class SwayReporter(Reporter):
    def __init__(self, record: Record, run: TrainingRun) -> None:
        self.record = record

    def plan(self, batch: RolloutBatch, step: int, sampled: RolloutBatch | None) -> tuple[RolloutBatch, bool | None]:
        return batch, True if step % self.record.settings.write_every == 0 else None

    def write(self, batch: RolloutBatch, step: int, table: Table | None) -> dict[str, float]:
        if table is None:
            return {}
        if table.failure:
            self.record.failed(step, table.failure)
            return {}
        found = table.columns["sway"]
        rows = torch.tensor(sorted(found))
        values = torch.cat([found[row] for row in rows.tolist()]).float()
        self.record.write(step, batch, rows, {"sway": with_gaps(values, batch, rows)}, {})
        return {"sway/largest": float(values.abs().max())}


INSTRUMENT = Instrument(SwaySettings, SwayReporter, SwayObserver, RECORD, needs=("next_gradient", "derivative"))


@contextmanager
def installed() -> Iterator[None]:
    """Inside, the instrument is known; other tests in this process look at those that ship."""
    registry.register(INSTRUMENT)
    try:
        yield
    finally:
        registry.forget(RECORD.name)
        del KINDS[RECORD.name]
        for column in RECORD.brings:
            del COLUMNS[column.name]
