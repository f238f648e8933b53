"""The blame of a step on verl: what the driver tells the ranks before the update, and the file that it makes of their
parts after it."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.instruments.blame.record import BlameRecord
from gradtrace.integrations.verl.blame_parts import BlameInputs, join_blame_parts, joined_blame
from gradtrace.integrations.verl.rank_files import clear_rank_files


class BlameRecorder:
    def __init__(self, record: BlameRecord, parts_dir: Path, ranks: int) -> None:
        self.blame = record
        self.parts_dir = parts_dir
        self.ranks = ranks
        clear_rank_files(parts_dir)

    def inputs(self, step: int, mini_batch: Tensor) -> BlameInputs:
        """`mini_batch`: long[R], −1 for rows that do not train."""
        return BlameInputs(step, int(mini_batch.max()) + 1, self.blame.is_due(step), str(self.parts_dir))

    def record(self, batch: RolloutBatch, step: int, mini_batch: Tensor) -> dict[str, float]:
        """Join the ranks' parts after the update, and write the file. Returns metrics."""
        part = join_blame_parts(self.parts_dir, step, self.ranks)
        if part.failure:
            self.blame.failed(GradtraceError(f"step {step}: {part.failure}"))
        blame = None if part.failure else joined_blame(part, batch, mini_batch)
        return self.blame.write(batch, step, blame, part.largest_norm, part.seconds)
