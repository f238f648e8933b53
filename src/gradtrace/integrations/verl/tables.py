"""The two messages of a step on verl: what the driver tells the ranks, and what ranks leave for the driver.

The message travels with the data of the update. Each rank answers with one safetensors file per step, in a folder of
the run that all nodes see: ranks write without waiting for each other; the driver reads when the update has returned.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save
from safetensors.torch import load
from torch import Tensor

from gradtrace.errors import GradtraceError
from gradtrace.instruments.contract import Table
from gradtrace.trace.files import atomic_write

ROW = "gradtrace_row"
"""Field with each sample's row in the step's `RolloutBatch`; −1 for padding."""
SAMPLED = "rollout_log_probs"
"""Field with the sampler's log-probs, where verl asks for them (actor_rollout_ref.rollout.calculate_log_probs)."""
CORRECTION = "rollout_is_weights"
"""What verl's loss multiplies each token by, where it corrects for the sampler (algorithm.rollout_correction)."""
STEP = "gradtrace_step"
"""Key of the `StepMessage` in the data of an update."""
FOLDER = "ranks"
"""In the folder of traces: where ranks leave their tables."""


@dataclass(frozen=True, eq=False)
class StepMessage:
    """The driver's message to every rank about a step that is observed."""

    step: int
    mini_batch: Tensor
    """long[R]: the optimizer step of an epoch that each row belongs to; −1 if it is not trained on."""
    plans: Mapping[str, Any]
    """Instrument → its plan."""

    def rows(self, mini_batch: int) -> Tensor:
        """Return the rows of a mini-batch, ascending: long[r]."""
        return (self.mini_batch == mini_batch).nonzero().squeeze(-1)

    @property
    def mini_batches(self) -> int:
        return int(self.mini_batch.max()) + 1


def write_tables(folder: Path, step: int, rank: int, tables: Mapping[str, Table]) -> None:
    """Write what this rank has found, each value under INSTRUMENT/COLUMN/ROW."""
    about = {
        name: {"facts": table.facts, "failure": table.failure, "seconds": table.seconds}
        for name, table in tables.items()
    }
    arrays = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}
    for name, table in tables.items():
        for column, found in table.columns.items():
            arrays |= {f"{name}/{column}/{row}": values.contiguous().numpy() for row, values in found.items()}
    atomic_write(_file(folder, step, rank), save(arrays))


def read_tables(folder: Path, step: int, ranks: int) -> dict[str, Table]:
    """Instrument → what all ranks have found together; their files are removed."""
    found: dict[str, list[Table]] = defaultdict(list)
    for rank in range(ranks):
        path = _file(folder, step, rank)
        if not path.is_file():
            raise GradtraceError(
                f"rank {rank} left no table of step {step} ({path}). Every node must see this folder; give a shared "
                "one with gradtrace.run_dir"
            )
        for name, table in _read(path).items():
            found[name].append(table)
    for rank in range(ranks):
        _file(folder, step, rank).unlink()
    return {name: Table.joined(of_ranks) for name, of_ranks in found.items()}


def clear_tables(folder: Path) -> None:
    """Make the folder, and forget what ranks left of a step that was not finished."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("step_*"):
        file.unlink()


def _read(path: Path) -> dict[str, Table]:
    tensors: dict[str, torch.Tensor] = load(path.read_bytes())
    about = json.loads(tensors.pop("about").numpy().tobytes())
    tables = {name: Table({}, **values) for name, values in about.items()}
    for key, values in tensors.items():
        name, column, row = key.split("/")
        tables[name].put(column, {int(row): values})
    return tables


def _file(folder: Path, step: int, rank: int) -> Path:
    return folder / f"step_{step:06d}.rank_{rank:05d}.safetensors"
