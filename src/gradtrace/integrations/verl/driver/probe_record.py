"""The entropy probe's file and metrics, made by the driver from the parts of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.instruments.entropy_probe.record import ProbeRecord
from gradtrace.integrations.verl.parts import ProbePart, clear_rank_files, joined_probe
from gradtrace.integrations.verl.told import ProbeInputs
from gradtrace.policy.rollouts import keep_groups

if TYPE_CHECKING:
    from gradtrace.integrations.verl.driver.probe_sampling import EvaluationSampler


class ProbeRecorder:
    """The driver's side of a probe: `sample` after the rollout, `inputs` before the update, `record` after it."""

    sampler: EvaluationSampler
    """Set when the replicas are there."""

    def __init__(self, record: ProbeRecord, parts_dir: Path, ranks: int) -> None:
        self.on_disk = record
        self.parts_dir = parts_dir
        self.ranks = ranks
        self.evaluation: RolloutBatch | None = None
        clear_rank_files(parts_dir)

    def sample(self, step: int) -> None:
        self.evaluation = None
        if self.on_disk.is_due(step):
            try:
                self.evaluation = self.sampler.sample(step)
            except Exception as error:  # whatever a rollout engine says; a dead one is the watch's business
                self.on_disk.failed(step, f"E could not be sampled: {type(error).__name__}: {error}")

    def inputs(self, update: RolloutBatch, step: int) -> ProbeInputs | None:
        """What the ranks are told: E without the prompts of this rollout. None if this step is not probed."""
        if self.evaluation is None:
            return None
        self.evaluation = without_prompts(self.evaluation, update.prompts)
        if len(self.evaluation.prompts) < 2:
            self.evaluation = None
            why = "all held-out prompts (data.val_files) are in the rollout as well, or had no answer"
            self.on_disk.failed(step, why)
            return None
        prompts = [self.evaluation.prompts[group] for group in self.evaluation.group.tolist()]
        return ProbeInputs(step, prompts, self.evaluation.response_ids, str(self.parts_dir))

    def record(self, batch: RolloutBatch, rows: Tensor, step: int) -> dict[str, float]:
        """Join the ranks' parts after the update, and write the file. `rows`: long[r], U, ascending. Returns
        metrics."""
        if not self.on_disk.is_due(step):
            return {}
        evaluation, self.evaluation = self.evaluation, None
        probed, seconds = None, 0.0
        if evaluation is not None:
            part = ProbePart.joined(self.parts_dir, step, self.ranks)
            if part.failure:
                self.on_disk.failed(step, part.failure)
            else:
                probed, seconds = joined_probe(part, evaluation, rows), part.seconds
        return self.on_disk.write(batch, step, probed, seconds)


def without_prompts(batch: RolloutBatch, prompts: list[list[int]]) -> RolloutBatch:
    """The batch with only those sequences that have tokens and whose prompt is not among `prompts`; groups are numbered
    anew."""
    others = {tuple(prompt) for prompt in prompts}
    apart = torch.tensor([tuple(prompt) not in others for prompt in batch.prompts])
    kept = batch.select(apart[batch.group] & (batch.response_lengths > 0))
    return keep_groups(kept, kept.group.unique())
