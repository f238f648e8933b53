"""Mismatch: how much of the update is due to the sampler's log-probs not being the trainer's."""

from __future__ import annotations

import dataclasses

from gradtrace.instruments.contract import Instrument
from gradtrace.instruments.registry import later, register

EVERY = dataclasses.field(
    default=10,
    metadata={
        "minimum": 0,
        "maximum": None,
        "meaning": "Steps between measurements of mismatch/share_of_update, made where sampler and trainer disagree; 0 "
        "is never.",
    },
)
INSTRUMENT = register(
    Instrument(
        EVERY,
        later("gradtrace.instruments.mismatch.share:MismatchReporter"),
        later("gradtrace.instruments.mismatch.share:MismatchObserver"),
        name="mismatch",
        key="mismatch_every",
        needs=("policy_terms",),
        is_on=lambda every: every > 0,
    )
)
