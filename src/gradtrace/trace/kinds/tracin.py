"""The record of TracIn selection."""

from __future__ import annotations

import enum

from gradtrace.trace.kinds.shared import EVERY_KIND, EXPECTED, RUN_META
from gradtrace.trace.record import Column, InstrumentRecord, register_instrument

TRACIN = "tracin"


class TracinReason(enum.IntEnum):
    """Why TracIn selection kept or dropped a response."""

    KEPT_POSITIVE = 0
    KEPT_TOP_FRACTION = 1
    KEPT_FALLBACK = 2
    """Too few scores were positive, so the best half was kept."""
    KEPT_NOT_LOWEST = 3
    DROPPED_NEGATIVE = 4
    DROPPED_BELOW_FRACTION = 5
    DROPPED_LOWEST = 6
    DROPPED_NON_FINITE = 7
    KEPT_SCORE_ONLY = 8
    """`selection: none`: scored, and nothing was dropped."""
    VALIDATION = 9
    """No candidate: a response of the validation set, stored so that it can be looked at. Its score is NaN,
    its `kept` False, and its group holds validation responses only."""
    KEPT_NO_SIGNAL = 10
    """The validation gradient says nothing in this step (it is zero), so that everything was kept."""
    KEPT_ZERO = 11
    """Its own gradient is zero, or orthogonal: neither helpful nor harmful, and the rule drops harmful ones only."""
    DROPPED_ZERO = 12
    """Its own gradient is zero, or orthogonal, and the rule keeps helpful ones only."""
    KEPT_WEIGHTED = 13
    """The rule gives every response a weight instead of dropping some."""


_INNER = "inner product"
# fmt: off
_COLUMNS = (
    Column("score", "float32", "response", "TracIn score against the validation objective",
           unit=_INNER, is_signed=True),
    Column("kept", "bool", "response", "used by the update"),
    Column("reason", "uint8", "response", "why it was kept or dropped", values=TracinReason),
    Column("score_low", "float32", "response",
           "lower end of the score's 90 % interval over validation prompts; NaN = not measured", unit=_INNER),
    Column("score_high", "float32", "response", "upper end of that interval; NaN = not measured", unit=_INNER),
    Column("weight", "float32", "response", "what the update multiplies its advantage with; 0 = dropped"),
    Column("flipped", "bool", "response", "its reward was flipped on purpose (reward.flip_probability)"),
)
# fmt: on

register_instrument(
    InstrumentRecord(
        name=TRACIN,
        label="TracIn",
        meaning="score of every response against a validation objective, and what selection made of it",
        switch="trainer.tracin.enable=true",
        required=(*EVERY_KIND, "score", "kept", "reason"),
        optional=(
            *EXPECTED,
            *("accepted", "advantage", "entropy", "log_prob", "first_wrong"),
            *("score_low", "score_high", "weight", "flipped"),
        ),
        brings=_COLUMNS,
        meta={
            **RUN_META,
            "diagnosis": "list of sentences: what is notable about this step's scores",
            "selection": "the rule that kept and dropped",
            "val_strategy": "how the validation responses were chosen",
            "method": "how the scores were computed: ghost or tangent",
            "val_loss": "validation loss −mean_r(A_r Σ_t log-prob)",
            "val_loss_min": "the smallest part of one response in it",
            "val_loss_max": "the largest",
            "weighed": "Adam's moments weighed the scores; false before its first step, where they have another unit",
            "val_norm": "norm of the validation gradient",
            "train_norm": "norm of the gradient of the whole training batch; absent where it was not measured",
            "direction_norm": "norm of the preconditioned validation gradient, which scores are products with",
            "cosine": "cosine of the whole batch's gradient and the validation gradient",
            "val_norms": "norm of the validation gradient by layer group",
        },
    )
)
