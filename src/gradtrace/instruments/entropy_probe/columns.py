"""A probe as columns of the trace kind `entropy_probe` (the update's responses, then the evaluation's), and the probes
of a run on disk, in every host."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.instruments.columns import response_columns, token_column, turn_columns, with_gaps
from gradtrace.instruments.entropy_probe.estimates import Measured, Tokens, covariance_change
from gradtrace.instruments.entropy_probe.probe import Prediction, Shares
from gradtrace.instruments.observer import TraceRecord
from gradtrace.trace.schema import ENTROPY_PROBE, ProbeBatch, ragged


@dataclass(frozen=True, eq=False)
class Probed:
    """All that a probe has found about one optimizer step."""

    rows: Tensor
    """long[r]: U, the rows of the update's batch in this optimizer step, ascending."""
    evaluation: RolloutBatch
    prediction: Prediction
    shares: Shares
    """Shares of the responses of U, in the order of `rows`."""
    after: Tokens
    """E at the weights that the optimizer has made."""
    rate: float
    """Learning rate of the step."""

    @cached_property
    def measured(self) -> Measured:
        return self.prediction.against(self.after)

    def covariance(self, update: RolloutBatch) -> float:
        """The textbook's estimate of the change, from log-probs and advantages of U."""
        mask = update.response_mask[self.rows]
        log_probs, advantages = (update.need(name)[self.rows][mask] for name in ("old_log_probs", "advantages"))
        return covariance_change(log_probs, advantages, self.rate)

    def metrics(self) -> dict[str, float]:
        """What the step's metrics say about the probe."""
        prediction, measured, shares = self.prediction, self.measured, self.shares
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

    def meta(self, update: RolloutBatch) -> dict[str, Any]:
        """What the file says about the update as a whole; keys as in `trace.schema.META_KEYS`."""
        prediction, measured, shares = self.prediction, self.measured, self.shares
        return {
            "delta_h_predicted": prediction.change.value,
            "delta_h_predicted_stderr": prediction.change.stderr,
            "delta_h_measured": measured.change.value,
            "delta_h_measured_stderr": measured.change.stderr,
            "delta_h_difference_stderr": measured.difference.stderr,
            "delta_h_legacy": shares.legacy,
            "delta_h_covariance": self.covariance(update),
            "ess": measured.ess,
            "momentum_share": shares.momentum,
            "decay_share": shares.decay,
            "mean_entropy": prediction.base.mean_entropy,
            "learning_rate": self.rate,
        }

    def columns(self, update: RolloutBatch) -> dict[str, Any]:
        """The responses of U, then those of E. E was not judged: its rewards are NaN."""
        rows, evaluation, prediction = self.rows, self.evaluation, self.prediction
        u_groups, place = update.group[rows].unique(return_inverse=True)
        e_rows = torch.arange(len(evaluation))
        unjudged = evaluation.replace(rewards=torch.zeros(len(evaluation)), advantages=None)
        u, e = response_columns(update, rows), response_columns(unjudged, e_rows)
        e["reward"] = np.full(len(evaluation), np.nan, np.float32)
        prompts = [update.prompts[group] for group in u_groups.tolist()] + evaluation.prompts
        prompt_ids, prompt_offsets = ragged(prompts)
        both = [update.select(rows).only().replace(items=[]), evaluation.only().replace(items=[])]
        u_tokens = int(update.response_lengths[rows].sum())
        e_tokens = int(evaluation.response_lengths.sum())

        def of_e(values: Any) -> np.ndarray:
            return with_gaps(values, evaluation, e_rows)

        def joined(first: Any, second: Any) -> np.ndarray:
            return np.concatenate([np.asarray(first), np.asarray(second)])

        return {
            "group_id": joined(u_groups, len(update.prompts) + np.arange(len(evaluation.prompts))),
            "prompt_ids": prompt_ids,
            "prompt_offsets": prompt_offsets,
            "group": joined(place, len(u_groups) + evaluation.group),
            "row": joined(rows, np.full(len(evaluation), -1)),
            **{name: joined(u[name], e[name]) for name in ("reward", "length", "finished", "token_id")},
            **turn_columns(RolloutBatch.concat(both)),
            "accepted": joined(u["accepted"], np.zeros(len(evaluation), bool)),
            "advantage": joined(u["advantage"], np.full(len(evaluation), np.nan, np.float32)),
            "batch": joined(
                np.full(len(rows), int(ProbeBatch.UPDATE)),
                np.full(len(evaluation), int(ProbeBatch.EVALUATION)),
            ),
            "share": joined(self.shares.responses, np.zeros(len(evaluation))),
            "token_share": joined(with_gaps(self.shares.tokens, update, rows), np.zeros(e_tokens)),
            "entropy": joined(token_column(update.need("entropies"), update, rows), of_e(prediction.base.entropies)),
            "log_prob": joined(
                token_column(update.need("old_log_probs"), update, rows), of_e(prediction.base.log_probs)
            ),
            "entropy_change": joined(np.zeros(u_tokens), of_e(prediction.d_entropies)),
            "entropy_change_measured": joined(
                np.zeros(u_tokens), of_e(self.after.entropies - prediction.base.entropies)
            ),
        }


class ProbeRecord(TraceRecord):
    """`config` is an `EntropyProbeConfig`."""

    kind = ENTROPY_PROBE
    label = "entropy probe"

    def is_due(self, step: int) -> bool:
        return bool(step % self.config.every == 0)

    def failed(self, step: int, why: Exception | str) -> None:
        """A failing probe is shown and counted, and costs this step's probe; not the run, unless `on_error=raise`."""
        message = f"entropy probe: step {step} is not probed: {why}"
        if self.config.on_error == "raise":
            raise why if isinstance(why, Exception) else GradtraceError(message)
        self.errors += 1
        self.report(message)

    def write(self, batch: RolloutBatch, step: int, probed: Probed | None, seconds: float) -> dict[str, float]:
        """Write the file of a step that is due; None: it failed. Returns metrics."""
        try:
            if probed is not None:
                self.writer.write(step, probed.columns(batch), self.meta | probed.meta(batch))
        except Exception as error:
            self.failed(step, error)
            probed = None
        metrics = {"entropy_probe/errors": float(self.errors)}
        if probed is None:
            return metrics
        return {
            **metrics,
            **probed.metrics(),
            "entropy_probe/write_errors": float(self.writer.stats.failed),
            "timing_s/entropy_probe": seconds,
        }
