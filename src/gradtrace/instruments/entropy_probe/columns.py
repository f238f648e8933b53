"""A probe as columns of the trace kind `entropy_probe`: the update's responses, then the evaluation's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.instruments.columns import response_columns, token_column
from gradtrace.instruments.entropy_probe.estimates import Measured, Tokens
from gradtrace.instruments.entropy_probe.probe import Prediction, Shares
from gradtrace.trace.schema import ProbeBatch, ragged


def probe_columns(
    update: RolloutBatch,
    rows: Tensor,
    shares: Shares,
    evaluation: RolloutBatch,
    prediction: Prediction,
    after: Tokens,
) -> dict[str, Any]:
    """`rows` (long[r], ascending) of `update` are the responses of U, in the order of the shares. E was not judged: its
    rewards are NaN."""
    u_groups, place = update.group[rows].unique(return_inverse=True)
    e_rows = torch.arange(len(evaluation))
    unjudged = evaluation.replace(rewards=torch.zeros(len(evaluation)), advantages=None)
    u, e = response_columns(update, rows), response_columns(unjudged, e_rows)
    e["reward"] = np.full(len(evaluation), np.nan, np.float32)
    prompts = [update.prompts[group] for group in u_groups.tolist()] + evaluation.prompts
    prompt_ids, prompt_offsets = ragged(prompts)
    u_tokens = int(update.response_lengths[rows].sum())
    e_tokens = len(prediction.d_entropies)

    def joined(first: Any, second: Any) -> np.ndarray:
        return np.concatenate([np.asarray(first), np.asarray(second)])

    return {
        "group_id": joined(u_groups, len(update.prompts) + np.arange(len(evaluation.prompts))),
        "prompt_ids": prompt_ids,
        "prompt_offsets": prompt_offsets,
        "group": joined(place, len(u_groups) + evaluation.group),
        "row": joined(rows, np.full(len(evaluation), -1)),
        **{name: joined(u[name], e[name]) for name in ("reward", "length", "finished", "token_id")},
        "accepted": joined(u["accepted"], np.zeros(len(evaluation), bool)),
        "advantage": joined(u["advantage"], np.full(len(evaluation), np.nan, np.float32)),
        "batch": joined(
            np.full(len(rows), int(ProbeBatch.UPDATE)), np.full(len(evaluation), int(ProbeBatch.EVALUATION))
        ),
        "share": joined(shares.responses, np.zeros(len(evaluation))),
        "token_share": joined(shares.tokens, np.zeros(e_tokens)),
        "entropy": joined(token_column(update.entropies, update, rows), prediction.base.entropies),  # type: ignore[arg-type]
        "log_prob": joined(token_column(update.old_log_probs, update, rows), prediction.base.log_probs),  # type: ignore[arg-type]
        "entropy_change": joined(np.zeros(u_tokens), prediction.d_entropies),
        "entropy_change_measured": joined(np.zeros(u_tokens), after.entropies - prediction.base.entropies),
    }


def probe_metrics(prediction: Prediction, measured: Measured, shares: Shares) -> dict[str, float]:
    """Under the names that the step's metrics have."""
    return {
        "entropy_probe/delta_h_predicted": prediction.change.value,
        "entropy_probe/delta_h_measured": measured.change.value,
        "entropy_probe/stderr": measured.change.stderr,
        "entropy_probe/stderr_predicted": prediction.change.stderr,
        "entropy_probe/stderr_difference": measured.difference.stderr,
        "entropy_probe/ess": measured.ess,
        "entropy_probe/momentum_share": shares.momentum,
        "entropy_probe/decay_share": shares.decay,
    }


def probe_meta(
    prediction: Prediction, measured: Measured, shares: Shares, covariance: float
) -> dict[str, Any]:
    """What the file says about the update as a whole; keys as in `trace.schema.META_KEYS`."""
    return {
        "delta_h_predicted": prediction.change.value,
        "delta_h_predicted_stderr": prediction.change.stderr,
        "delta_h_measured": measured.change.value,
        "delta_h_measured_stderr": measured.change.stderr,
        "delta_h_difference_stderr": measured.difference.stderr,
        "delta_h_legacy": shares.legacy,
        "delta_h_covariance": covariance,
        "ess": measured.ess,
        "momentum_share": shares.momentum,
        "decay_share": shares.decay,
        "mean_entropy": prediction.base.mean_entropy,
    }
