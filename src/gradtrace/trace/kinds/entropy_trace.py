"""The record of the entropy trace."""

from __future__ import annotations

from gradtrace.trace.kinds.shared import EVERY_KIND, EXPECTED, REWARD_PARTS, RUN_META
from gradtrace.trace.record import InstrumentRecord, register_instrument

ENTROPY_TRACE = "entropy_trace"

register_instrument(
    InstrumentRecord(
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
)
