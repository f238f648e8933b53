"""The entropy probe beside the files: which prompts E is sampled from, and a probe as columns, the update's responses
first, then the evaluation's.

E is drawn from the full distribution whatever `rollout.top_p` is, with random numbers of its own, so that weights and
random numbers of training are bit-identical with the probe on and off.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradtrace.algorithms import accepted
from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.instruments.columns import followed_by, token_column, with_gaps
from gradtrace.instruments.contract import Reporter, Samples, Table, TrainingRun
from gradtrace.instruments.entropy_probe import ProbeBatch
from gradtrace.instruments.entropy_probe.estimates import Measured, Prediction, Tokens, covariance_change
from gradtrace.instruments.entropy_probe.probe import Shares
from gradtrace.instruments.record import Record
from gradtrace.metrics import GENERATED
from gradtrace.policy.rollouts import keep_groups

METRICS = {
    **{name: name for name in ("delta_h_predicted", "delta_h_measured", "ess", "momentum_share", "decay_share")},
    "stderr": "delta_h_measured_stderr",
    "stderr_predicted": "delta_h_predicted_stderr",
    "stderr_difference": "delta_h_difference_stderr",
}
"""Name in the step's metrics → key in the file's meta."""


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

    @staticmethod
    def of_table(evaluation: RolloutBatch, table: Table | None) -> Probed:
        """What the observers have found with E, of which `evaluation` is all."""
        if table is None or table.failure:
            raise GradtraceError(table.failure if table is not None else "no process has observed it")
        columns, facts = table.columns, table.facts
        if "after" not in columns:
            raise GradtraceError("the optimizer made no step: its gradient was not finite")
        lengths, sequences = evaluation.written_counts, range(len(evaluation))
        base, derivative, after = (
            torch.cat([columns[name][row] for row in sequences], dim=1) for name in ("base", "derivative", "after")
        )
        rows = torch.tensor(sorted(columns["shares"]))
        of_responses = [columns["shares"][row] for row in rows.tolist()]
        return Probed(
            rows,
            evaluation,
            Prediction(Tokens(lengths, evaluation.group, *base), *derivative),
            Shares(
                torch.cat(of_responses),
                torch.stack([own.sum() for own in of_responses]),
                *(facts[name] for name in ("momentum", "decay", "legacy")),
            ),
            Tokens(lengths, evaluation.group, *after),
            facts["rate"],
        )

    @cached_property
    def measured(self) -> Measured:
        return self.prediction.against(self.after)

    def covariance(self, update: RolloutBatch) -> float:
        """The textbook's estimate of the change, from log-probs and advantages of U."""
        mask = update.response_mask[self.rows]
        log_probs, advantages = (update.need(name)[self.rows][mask] for name in ("old_log_probs", "advantages"))
        return covariance_change(log_probs, advantages, self.rate)

    def meta(self, update: RolloutBatch) -> dict[str, Any]:
        """What the file says about the update as a whole; keys as in its record."""
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

    def write(self, record: Record, step: int, update: RolloutBatch, **more: Any) -> dict[str, Any]:
        """Write its file; `more` goes into the meta. Returns the meta."""
        rows = torch.arange(len(self.rows) + len(self.evaluation))
        meta = self.meta(update) | more
        record.write(step, self.joint(update), rows, self.columns(update), meta)
        return meta

    def joint(self, update: RolloutBatch) -> RolloutBatch:
        """The responses of U and then those of E, in groups of their own."""
        evaluation = self.evaluation
        of_update = keep_groups(update.select(self.rows), update.group[self.rows].unique())
        unjudged = evaluation.replace(
            rewards=torch.zeros(len(evaluation)),
            advantages=torch.where(evaluation.response_mask, torch.nan, 0.0),
        )
        known = ("rewards", "advantages")
        return RolloutBatch.concat([part.only(*known).replace(items=[]) for part in (of_update, unjudged)])

    def columns(self, update: RolloutBatch) -> dict[str, Any]:
        """What `Record.write` cannot know of `joint`, and the probe's own."""
        rows, evaluation, base = self.rows, self.evaluation, self.prediction.base
        e_rows = torch.arange(len(evaluation))
        e_tokens = int(evaluation.response_lengths.sum())
        nothing = np.zeros(int(update.response_lengths[rows].sum()))

        def then_e(of_update: Any, of_evaluation: Any) -> np.ndarray:
            return np.concatenate([np.asarray(of_update), with_gaps(of_evaluation, evaluation, e_rows)])

        def then(of_update: Any, gap: float) -> np.ndarray:
            return followed_by(of_update, len(evaluation), gap)

        return {
            "group_id": np.append(
                update.group[rows].unique(), len(update.prompts) + np.arange(len(evaluation.prompts))
            ),
            "row": then(rows, -1),
            "reward": then(update.need("rewards")[rows], np.nan),  # E was not judged
            "accepted": then(accepted(update.need("rewards"), update.group)[rows], False),
            "batch": then(np.full(len(rows), ProbeBatch.UPDATE), ProbeBatch.EVALUATION),
            "share": then(self.shares.responses, 0.0),
            "token_share": followed_by(with_gaps(self.shares.tokens, update, rows), e_tokens, 0.0),
            "entropy": then_e(token_column(update.need("entropies"), update, rows), base.entropies),
            "log_prob": then_e(token_column(update.need("old_log_probs"), update, rows), base.log_probs),
            "entropy_change": then_e(nothing, self.prediction.d_entropies),
            "entropy_change_measured": then_e(nothing, self.after.entropies - base.entropies),
        }


class ProbeReporter(Reporter):
    def __init__(self, record: Record, run: TrainingRun) -> None:
        self.record = record
        self.settings = record.settings
        self.seed = run.seed
        self.key = run.setting("entropy_probe")
        self.prompts = run.held_out(self.settings.prompts, f"{self.key}.prompts")
        if len(self.prompts) < 2:
            raise GradtraceError(
                f"{self.key} needs at least 2 held-out prompts, the run has {len(self.prompts)}: give "
                "data.validation files, or a larger data.validation_fraction"
            )
        self._evaluation: RolloutBatch | None = None
        """E of the step under way."""

    def is_due(self, step: int) -> bool:
        return bool(step % self.settings.every == 0)

    def samples(self, step: int) -> Samples | None:
        if not self.is_due(step):
            return None
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + step)
        return Samples(self.prompts, self.settings.n, generator, full_distribution=True)

    def plan(
        self, batch: RolloutBatch, step: int, sampled: RolloutBatch | None
    ) -> tuple[RolloutBatch, RolloutBatch | None]:
        """E without the prompts of this rollout."""
        self._evaluation = None
        if self.is_due(step) and sampled is not None:
            evaluation = without_prompts(sampled, batch.prompts)
            if len(evaluation.prompts) < 2:
                why = "all held-out prompts are in the rollout as well, or had no answer"
                self.record.failed(step, f"{why}: nothing is left to evaluate on")
            else:
                self._evaluation = evaluation
        return batch, self._evaluation

    def write(self, batch: RolloutBatch, step: int, table: Table | None) -> dict[str, float]:
        if not self.is_due(step):
            return {}
        evaluation, self._evaluation = self._evaluation, None
        found: dict[str, float] = {}
        if evaluation is not None:
            try:
                meta = Probed.of_table(evaluation, table).write(self.record, step, batch)
                found = {f"entropy_probe/{name}": meta[key] for name, key in METRICS.items()}
            except Exception as error:
                self.record.failed(step, error)
        metrics = {"entropy_probe/errors": float(self.record.errors)}
        if not found or table is None or evaluation is None:
            return metrics
        return {
            **metrics,
            **found,
            "entropy_probe/write_errors": self.record.write_errors,
            "timing_s/entropy_probe": table.seconds,
            GENERATED: float(len(evaluation)),
        }


def without_prompts(batch: RolloutBatch, prompts: list[list[int]]) -> RolloutBatch:
    """The batch with only those sequences that have tokens and whose prompt is not among `prompts`; groups are numbered
    anew."""
    others = {tuple(prompt) for prompt in prompts}
    apart = torch.tensor([tuple(prompt) not in others for prompt in batch.prompts])
    kept = batch.select(apart[batch.group] & (batch.response_lengths > 0))
    return keep_groups(kept, kept.group.unique())
