"""The entropy probe: what an update will do to entropy, predicted, measured, and attributed to tokens and responses."""

from gradtrace.instruments.entropy_probe.estimates import Estimate, Measured, Tokens
from gradtrace.instruments.entropy_probe.passes import Pass, TokenBatch, evaluation_batch, update_batch
from gradtrace.instruments.entropy_probe.probe import EntropyProbe, Prediction, Shares, Update

__all__ = [
    "EntropyProbe",
    "Estimate",
    "Measured",
    "Pass",
    "Prediction",
    "Shares",
    "TokenBatch",
    "Tokens",
    "Update",
    "evaluation_batch",
    "update_batch",
]
