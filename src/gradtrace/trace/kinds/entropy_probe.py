"""The record of the entropy probe."""

from __future__ import annotations

import enum

from gradtrace.trace.kinds.shared import EVERY_KIND, RUN_META
from gradtrace.trace.record import Column, InstrumentRecord, register_instrument

ENTROPY_PROBE = "entropy_probe"


class ProbeBatch(enum.IntEnum):
    """Which batch of the entropy probe a response belongs to."""

    EVALUATION = 0
    UPDATE = 1


# fmt: off
_COLUMNS = (
    Column("batch", "uint8", "response", "the probe's evaluation or update batch", values=ProbeBatch),
    Column("share", "float32", "response",
           "its share of the predicted entropy change (update batch; else 0); positive = raises entropy",
           unit="nats", is_signed=True),
    Column("entropy_change", "float32", "token", "predicted change of the entropy at this token (evaluation batch)",
           unit="nats", is_signed=True),
    Column("entropy_change_measured", "float32", "token",
           "measured change of the entropy at this token, same prefix, after the update (evaluation batch)",
           unit="nats", is_signed=True),
    Column("token_share", "float32", "token",
           "its share of the predicted entropy change (update batch; else 0); sums to the response's share; "
           "positive = raises entropy", unit="nats", is_signed=True),
)
# fmt: on

register_instrument(
    InstrumentRecord(
        name=ENTROPY_PROBE,
        label="Entropy probe",
        meaning="predicted entropy change of an update: per evaluation token and per update response",
        switch="trainer.entropy_probe.every=1",
        required=(*EVERY_KIND, "batch", "share", "entropy"),
        optional=(
            *("accepted", "advantage", "log_prob"),
            *("entropy_change", "entropy_change_measured", "token_share"),
        ),
        brings=_COLUMNS,
        page="probe",
        meta={  # every entropy change is in nats per token, positive = entropy rises
            **RUN_META,
            "delta_h_predicted": "predicted change of the mean entropy by this update",
            "delta_h_predicted_stderr": "standard error of the prediction (jackknife over evaluation sequences)",
            "delta_h_measured": "measured change, same sequences with importance weights",
            "delta_h_measured_stderr": "standard error of the measured change",
            "delta_h_difference_stderr": "standard error of predicted minus measured, which share most of their noise",
            "mean_entropy": "mean entropy of the evaluation sequences before the update, nats per token",
            "learning_rate": "learning rate of the update",
            "delta_h_fresh": "measured change on freshly sampled sequences",
            "delta_h_fresh_stderr": "standard error of the change on fresh sequences",
            "delta_h_legacy": "predicted change in the older form, inner product of mean gradients",
            "delta_h_covariance": "the estimate −η·Cov(log π, A)",
            "ess": "effective sample size of the importance weights, in sequences",
            "momentum_share": "part of delta_h_predicted that earlier batches (the first moment) bring",
            "decay_share": "part of delta_h_predicted that weight decay brings",
            "eta_sweep": "list of {eta, predicted, measured, predicted_stderr, measured_stderr, ess}; eta in units of "
            "the learning rate of the update",
        },
    )
)
