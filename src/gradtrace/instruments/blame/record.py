"""The blame of a run on disk: from a step's shares to its file and its metrics, in every host."""

from __future__ import annotations

import torch

from gradtrace.batch import RolloutBatch
from gradtrace.instruments.blame.shares import StepBlame, blame_columns, blame_metrics
from gradtrace.instruments.record import TraceRecord


class BlameRecord(TraceRecord):
    """`config` is a `BlameConfig`."""

    label = "blame"
    last: StepBlame | None = None
    """Of the step that was written last; None if the one after it was not taken."""

    def is_due(self, step: int) -> bool:
        """Whether this step is shared out whatever its gradient is like, with the gradients of its responses."""
        return bool(step % self.config.write_every == 0)

    def failed(self, error: Exception) -> None:
        """An error costs a step's blame, not the run, unless `on_error=raise`."""
        if self.config.on_error == "raise":
            raise error
        self.errors += 1
        self.report(f"blame: this step's gradient is not shared out: {error}")

    def write(
        self, batch: RolloutBatch, step: int, blame: StepBlame | None, largest_norm: float, seconds: float
    ) -> dict[str, float]:
        """Write the file of a step that is due or was unusual; None: it failed. Returns metrics."""
        self.last = None
        metrics = {"blame/errors": float(self.errors), "blame/write_errors": float(self.writer.stats.failed)}
        if largest_norm:
            metrics["blame/largest_grad_norm"] = largest_norm
        if blame is None or not (self.is_due(step) or blame.updates):
            return metrics
        made = torch.tensor([int(update["number"]) for update in blame.updates])
        if not self.is_due(step):  # of an unusual step only the optimizer steps that were
            blame.optimizer_step[~torch.isin(blame.optimizer_step, made)] = -1
        blame.skipped = sorted(set(blame.optimizer_step[blame.rows].tolist()) - set(made.tolist()))
        meta = self.meta | {"updates": blame.updates, "skipped": blame.skipped}
        self.writer.write(step, blame_columns(batch, blame, self.truth), meta)
        self.last = blame
        return {**blame_metrics(batch, blame), **metrics, "timing_s/blame": seconds}
