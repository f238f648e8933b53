"""What the driver and the ranks tell each other about a step's blame: which step it is goes there with the update's
data, what a rank has found of its responses comes back as a file in RUN/blame/parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.instruments.blame.shares import StepBlame
from gradtrace.integrations.verl.rank_files import cut, put_ragged, read_rank_files, write_rank_file

BLAME_STEP = "gradtrace_blame"
"""Key of a `BlameInputs` in the data of an update."""
TOKENS = ("share", "push", "log_probs")
"""Columns with a number for each token that the policy wrote."""


@dataclass(frozen=True, eq=False)
class BlameInputs:
    """The same on all ranks."""

    step: int
    mini_batches: int
    """Optimizer steps of the first epoch; later ones are not shared out."""
    is_due: bool
    """Whatever the gradient is like; else only if it is unusual."""
    parts_dir: str


@dataclass(eq=False)
class BlamePart:
    """What a rank, or all of them, know of a step's responses."""

    tokens: dict[int, Tensor] = field(default_factory=dict)
    """Row of the batch → float64[3, t]: `TOKENS` of what the policy wrote."""
    norms: dict[int, float] = field(default_factory=dict)
    sketches: dict[int, Tensor] = field(default_factory=dict)
    updates: list[dict[str, float]] = field(default_factory=list)
    """One for each optimizer step that was shared out; the same on all ranks, as is the next."""
    largest_norm: float = 0.0
    seconds: float = 0.0
    failure: str = ""


def write_blame_part(folder: Path, step: int, rank: int, part: BlamePart) -> None:
    shared, measured = sorted(part.tokens), sorted(part.norms)
    arrays = {
        "row": np.array(shared, np.int64),
        "measured_row": np.array(measured, np.int64),
        "norm": np.array([part.norms[row] for row in measured], np.float64),
    }
    put_ragged(arrays, "tokens", [part.tokens[row].reshape(-1).numpy() for row in shared], "float64")
    put_ragged(arrays, "sketch", [part.sketches[row].numpy() for row in measured], "float32")
    about = {name: getattr(part, name) for name in ("updates", "largest_norm", "seconds", "failure")}
    write_rank_file(folder, step, rank, arrays, about)


def join_blame_parts(folder: Path, step: int, ranks: int) -> BlamePart:
    """Join what all ranks have found. Parts that were joined are removed."""
    joined = BlamePart()
    for arrays, about in read_rank_files(folder, step, range(ranks), "blame").values():
        for index, row in enumerate(arrays["row"].tolist()):
            values = torch.from_numpy(cut(arrays, "tokens", index).copy())
            joined.tokens[row] = values.view(len(TOKENS), -1)
        for index, row in enumerate(arrays["measured_row"].tolist()):
            joined.norms[row] = float(arrays["norm"][index])
            joined.sketches[row] = torch.from_numpy(cut(arrays, "sketch", index).copy())
        joined.updates, joined.largest_norm = about["updates"], about["largest_norm"]
        joined.seconds = max(joined.seconds, about["seconds"])
        joined.failure = joined.failure or about["failure"]
    return joined


def joined_blame(part: BlamePart, batch: RolloutBatch, mini_batch: Tensor) -> StepBlame:
    """The step's blame as one process would have made it. `mini_batch`: long[R], −1 for rows that did not train."""
    blame = StepBlame.of(batch)
    blame.optimizer_step[:] = mini_batch
    for row, values in part.tokens.items():
        mask = batch.response_mask[row]
        blame.share[row, mask], blame.push[row, mask], blame.log_probs[row, mask] = values
    for row, norm in part.norms.items():
        blame.norm[row] = norm
    blame.sketch, blame.updates = part.sketches, part.updates
    return blame
