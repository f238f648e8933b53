"""What ranks leave for the driver: one npz of flat arrays per step and rank, in a folder of the run that all nodes see.

Ranks write without waiting for each other; the driver reads when the update has returned, and removes what it has read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from gradtrace.errors import GradtraceError
from gradtrace.trace.atomic import atomic_write
from gradtrace.trace.safe_npz import dump_npz
from gradtrace.trace.schema import ragged

Arrays = dict[str, np.ndarray]


def write_rank_file(folder: Path, step: int, rank: int, arrays: Arrays, about: dict[str, Any]) -> None:
    """`about`: small values beside the arrays, as JSON."""
    packed = arrays | {"about_json": np.frombuffer(json.dumps(about).encode(), np.uint8)}
    atomic_write(rank_file(folder, step, rank), dump_npz(packed))


def read_rank_files(
    folder: Path, step: int, ranks: Iterable[int], what: str
) -> dict[int, tuple[Arrays, dict[str, Any]]]:
    """Rank → the arrays and values that it wrote; the files are removed. `what` names the instrument in an error."""
    found = {}
    for rank in ranks:
        path = rank_file(folder, step, rank)
        if not path.is_file():
            raise GradtraceError(
                f"rank {rank} left no part of the {what} of step {step} ({path}). Every node must see this folder; "
                "give a shared one with gradtrace.run_dir"
            )
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        found[rank] = arrays, json.loads(arrays.pop("about_json").tobytes())
    for rank in found:
        rank_file(folder, step, rank).unlink()
    return found


def clear_rank_files(folder: Path) -> None:
    """Make the folder, and forget what ranks left of a step that was not finished."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("step_*.npz"):
        file.unlink()


def rank_file(folder: Path, step: int, rank: int) -> Path:
    return folder / f"step_{step:06d}.rank_{rank:05d}.npz"


def put_ragged(arrays: Arrays, name: str, values: list[Any], dtype: str = "int32") -> None:
    """Several arrays of different lengths as one, with offsets; `cut` takes one of them out again."""
    arrays[name], arrays[f"{name}_offsets"] = ragged(values, dtype)


def cut(arrays: Arrays, name: str, index: int) -> np.ndarray:
    begin, end = arrays[f"{name}_offsets"][index : index + 2]
    return arrays[name][begin:end]
