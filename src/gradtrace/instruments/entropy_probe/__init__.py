"""The entropy probe: what an update will do to entropy, predicted, measured, and attributed to tokens and responses."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from gradtrace.attribution.config import number
from gradtrace.errors import GradtraceError
from gradtrace.instruments.contract import Instrument
from gradtrace.instruments.registry import later, register
from gradtrace.instruments.settings import FilesConfig
from gradtrace.trace.columns import EVERY_KIND, RUN_META, Column, InstrumentRecord

ENTROPY_PROBE = "entropy_probe"


class ProbeBatch(enum.IntEnum):
    """Which batch of the entropy probe a response belongs to."""

    EVALUATION = 0
    UPDATE = 1


@dataclass
class EntropyProbeConfig(FilesConfig):
    every: int = number(0, minimum=0)
    """Steps between probes: the entropy change of the step's first optimizer step, predicted before it and measured
    after it; 0 is never."""
    prompts: int = number(128, minimum=2)
    """Held-out prompts that entropy is measured on, at most; a new response to each in every probe."""
    n: int = number(1, minimum=1)
    """Responses per prompt."""

    def check_run(self, path: str, responses: int, dropout: float) -> None:
        if dropout:
            raise GradtraceError(
                f"{path}: with model.lora.dropout the update is of another model than the one that is sampled and "
                "measured: set model.lora.dropout=0."
            )


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
           "positive = raises entropy", unit="nats", is_signed=True, adds_up=True),
)
# fmt: on

RECORD = InstrumentRecord(
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

INSTRUMENT = register(
    Instrument(
        EntropyProbeConfig,
        later("gradtrace.instruments.entropy_probe.reporter:ProbeReporter"),
        later("gradtrace.instruments.entropy_probe.observer:ProbeObserver"),
        RECORD,
        needs=("hooks", "token_terms", "derivative", "next_gradient", "fresh_samples"),
        is_on=lambda settings: settings.every > 0,
        held_out=lambda settings: settings.prompts,
    )
)
