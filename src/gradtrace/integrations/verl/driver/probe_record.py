"""The entropy probe's file and metrics, made by the driver from the parts of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.config import EntropyProbeConfig
from gradtrace.errors import GradtraceError
from gradtrace.integrations.verl.probe_parts import ProbeInputs, join_probe_parts, joined
from gradtrace.policy.rollouts import keep_groups
from gradtrace.trace.writer import TraceWriter

if TYPE_CHECKING:
    from gradtrace.integrations.verl.driver.probe_sampling import EvaluationSampler


class ProbeRecorder:
    """The driver's side of a probe: `sample` after the rollout, `inputs` before the update, `record` after it."""

    sampler: EvaluationSampler
    """Set when the replicas are there."""

    def __init__(
        self,
        settings: EntropyProbeConfig,
        writer: TraceWriter,
        parts_dir: Path,
        ranks: int,
        meta: dict[str, Any],
        report: Callable[[str], None],
    ) -> None:
        self.settings = settings
        self.writer = writer
        self.parts_dir = parts_dir
        self.ranks = ranks
        self.meta = meta
        self.report = report
        self.errors = 0
        self.evaluation: RolloutBatch | None = None
        parts_dir.mkdir(parents=True, exist_ok=True)

    def sample(self, step: int) -> None:
        self.evaluation = None
        if step % self.settings.every == 0:
            try:
                self.evaluation = self.sampler.sample(step)
            except Exception as error:  # whatever a rollout engine says; a dead one is the watch's business
                self._failed(step, f"E could not be sampled: {type(error).__name__}: {error}")

    def inputs(self, update: RolloutBatch, step: int) -> ProbeInputs | None:
        """What the ranks are told: E without the prompts of this rollout. None if this step is not probed."""
        if self.evaluation is None:
            return None
        self.evaluation = without_prompts(self.evaluation, update.prompts)
        if len(self.evaluation.prompts) < 2:
            self.evaluation = None
            self._failed(
                step, "all held-out prompts (data.val_files) are in the rollout as well, or had no answer"
            )
            return None
        prompts = [self.evaluation.prompts[group] for group in self.evaluation.group.tolist()]
        return ProbeInputs(step, prompts, self.evaluation.response_ids, str(self.parts_dir))

    def _failed(self, step: int, why: str) -> None:
        self.errors += 1
        message = f"entropy probe: step {step} is not probed: {why}"
        if self.settings.on_error == "raise":
            raise GradtraceError(message)
        self.report(message)

    def record(self, batch: RolloutBatch, rows: Tensor, step: int) -> dict[str, float]:
        """Join the ranks' parts after the update, and write the file. `rows`: long[r], U, ascending. Returns
        metrics."""
        if step % self.settings.every:
            return {}
        evaluation, self.evaluation = self.evaluation, None
        if evaluation is None:
            return {"entropy_probe/errors": float(self.errors)}
        part = join_probe_parts(self.parts_dir, step, self.ranks)
        if part.failure:
            self._failed(step, part.failure)
            return {"entropy_probe/errors": float(self.errors)}
        probed = joined(part, evaluation, rows)
        self.writer.write(step, probed.columns(batch), self.meta | probed.meta(batch))
        return {
            "entropy_probe/errors": float(self.errors),
            **probed.metrics(),
            "entropy_probe/write_errors": float(self.writer.stats.failed),
            "timing_s/entropy_probe": part.seconds,
        }


def without_prompts(batch: RolloutBatch, prompts: list[list[int]]) -> RolloutBatch:
    """The batch with only those sequences that have tokens and whose prompt is not among `prompts`; groups are numbered
    anew."""
    others = {tuple(prompt) for prompt in prompts}
    apart = torch.tensor([tuple(prompt) not in others for prompt in batch.prompts])
    kept = batch.select(apart[batch.group] & (batch.response_lengths > 0))
    return keep_groups(kept, kept.group.unique())
