"""The share of the update that sampler and trainer make by disagreeing: which steps measure it, what ranks found."""

from __future__ import annotations

from pathlib import Path

from gradtrace.batch import RolloutBatch
from gradtrace.instruments.mismatch import NOTABLE, sampler_gap
from gradtrace.integrations.verl.rank_files import read_rank_files
from gradtrace.integrations.verl.step_labels import MismatchInputs


class MismatchRecorder:
    def __init__(self, every: int, parts_dir: Path, ranks: int) -> None:
        self.every = every
        self.parts_dir = parts_dir
        self.ranks = ranks
        self.last: MismatchInputs | None = None

    def inputs(self, batch: RolloutBatch, step: int) -> MismatchInputs | None:
        """None: this step is not measured, since it is not its turn or there is nothing to measure."""
        self.last = None
        gap = sampler_gap(batch) if self.every and step % self.every == 0 else None
        if gap is not None and float(gap.abs().max()) >= NOTABLE:
            self.parts_dir.mkdir(parents=True, exist_ok=True)
            self.last = MismatchInputs(step, str(self.parts_dir))
        return self.last

    def metrics(self) -> dict[str, float]:
        """Of the step that `inputs` was last called for, after its update."""
        if self.last is None:
            return {}
        found = read_rank_files(self.parts_dir, self.last.step, range(self.ranks), "mismatch")
        metrics: dict[str, float] = found[0][1]["metrics"]  # the same on all ranks
        return metrics
