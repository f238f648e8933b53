"""Entropy trace: entropy and log-prob of every token of a rollout."""

from __future__ import annotations

from dataclasses import dataclass

from gradtrace.instruments.contract import Instrument
from gradtrace.instruments.registry import later, register
from gradtrace.instruments.settings import TraceConfig
from gradtrace.trace.columns import EVERY_KIND, EXPECTED, REWARD_PARTS, RUN_META, InstrumentRecord

ENTROPY_TRACE = "entropy_trace"


@dataclass
class EntropyTraceConfig(TraceConfig):
    enable: bool = False
    """Store entropy and log-prob of every response token."""


RECORD = InstrumentRecord(
    name=ENTROPY_TRACE,
    label="Entropy trace",
    meaning="entropy and log-prob of every token of the rollout batch",
    switch="trainer.entropy_trace.enable=true",
    required=(*EVERY_KIND, "accepted"),
    optional=(
        *EXPECTED,
        *REWARD_PARTS,
        *("group_status", "advantage", "selection", "optimizer_step", "first_wrong"),
        *("entropy", "log_prob", "sampler_log_prob", "ratio"),  # imported rollouts may have none of them
    ),
    meta={
        **RUN_META,
        "imported_from": "file or folder that the rollouts were imported from",
        "format": "its format",
    },
    page=None,
)

INSTRUMENT = register(
    Instrument(
        EntropyTraceConfig,
        later("gradtrace.instruments.entropy_trace.reporter:EntropyReporter"),
        record=RECORD,
        with_traces=True,
    )
)
