"""Convert the older trace format: one npz per step with padded arrays, prompts as a pickled object array.

Arrays of a step (N responses padded to T tokens): `responses` int[N, T], `response_mask` [N, T], `reward` [N],
`accepted` bool[N], `group_id` [N] (numbers or strings), `prompt_ids` object[N] (or one per group), and
`influence` float[N, T], `entropies` float[N, T]. Other arrays are left alone, and never unpickled.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gradtrace.errors import GradtraceError
from gradtrace.trace import schema
from gradtrace.trace.confined import RefusedError, read_confined
from gradtrace.trace.legacy_pickle import unpickle_id_lists
from gradtrace.trace.safe_npz import SafeNpz, UnsafeNpzError
from gradtrace.trace.writer import TraceWriter

# padding compresses to almost nothing, so the usual limit against zip bombs would refuse honest files
_MAX_RATIO = 1100
_MAX_FILE_BYTES = 1 << 30
Credit = Literal["position", "loss_term"]


@dataclass
class Imported:
    kind: str = ""
    steps: list[int] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """File name to the reason why it was left out."""


def import_legacy(source: Path, run_dir: Path, credit: Credit = "position") -> Imported:
    """Convert every step file in `source` (or `source/steps`) into a trace of run `run_dir`."""
    folder = source / "steps" if (source / "steps").is_dir() else source
    files = {_step_of(path): path for path in sorted(folder.glob("*.npz")) if _step_of(path) is not None}
    if not files:
        raise GradtraceError(f"no step files in {folder}: expected names such as step_000001.npz")
    report = Imported()
    writers: dict[str, TraceWriter] = {}
    try:
        for step, path in sorted(files.items(), key=lambda item: item[0] or 0):
            try:
                data = read_confined(folder.resolve(), path.name, limit=_MAX_FILE_BYTES + 1)
                if len(data) > _MAX_FILE_BYTES:
                    raise UnsafeNpzError(f"is larger than {_MAX_FILE_BYTES} bytes")
                kind, columns = convert(SafeNpz(data, list_pickled=True, max_ratio=_MAX_RATIO), credit)
                if kind not in writers:
                    writers[kind] = TraceWriter(run_dir, kind, on_error="raise")
                writers[kind].write(step or 0, columns, _meta(kind, path.name, credit))
                report.kind = kind
                report.steps.append(step or 0)
            except (UnsafeNpzError, RefusedError, schema.SchemaError) as error:
                report.refused[path.name] = str(error)
    finally:
        for writer in writers.values():
            writer.close()
    return report


def _step_of(path: Path) -> int | None:
    numbers = re.findall(r"\d+", path.stem)
    return int(numbers[-1]) if numbers else None


def _meta(kind: str, file: str, credit: Credit) -> dict[str, Any]:
    meta: dict[str, Any] = {"imported_from": file, "optimizer_step": "not recorded by the older format"}
    if kind == schema.INFLUENCE_TRACE:
        meta |= {"credit": [credit], "sign": schema.SIGN_STATEMENT}
    return meta


def convert(arrays: SafeNpz, credit: Credit) -> tuple[str, dict[str, Any]]:
    """(kind, columns) of one older step file: an influence trace if it has influence, else an entropy trace."""
    mask = _matrix(arrays, "response_mask") != 0
    rows, width = mask.shape

    def tokens(name: str) -> np.ndarray:
        values = _matrix(arrays, name)
        if values.shape != mask.shape:
            raise UnsafeNpzError(f"{name} is {values.shape}, response_mask is {mask.shape}")
        return values[mask]  # row after row: the flat order of our files

    group_ids, first_rows, group = np.unique(_vector(arrays, "group_id", rows), return_index=True, return_inverse=True)
    prompts, prompt_offsets = schema.ragged([*_prompts(arrays, rows, first_rows)], "int64")
    reward = _vector(arrays, "reward", rows)
    lengths = mask.sum(1)
    columns: dict[str, Any] = {
        "group_id": group_ids if group_ids.dtype.kind in "iu" else np.arange(len(group_ids)),
        "prompt_ids": prompts,
        "prompt_offsets": prompt_offsets,
        "group": group.reshape(-1),
        "row": np.arange(rows),
        "reward": reward,
        "accepted": _vector(arrays, "accepted", rows) != 0,
        "length": lengths,
        "finished": lengths < width,  # the best guess: it ended before the padding did
        "token_id": tokens("responses"),
        "group_status": [
            schema.GroupStatus.CONSTANT_REWARD
            if len(set(reward[group.reshape(-1) == g].tolist())) == 1
            else schema.GroupStatus.SCORED
            for g in range(len(group_ids))
        ],
        "selection": np.full(rows, schema.Selection.SELECTED),
        "optimizer_step": np.full(rows, -1),
    }
    if "entropies" in arrays:
        columns["entropy"] = tokens("entropies")
    if "influence" not in arrays:
        unknown = np.full(len(columns["token_id"]), np.nan, np.float32)
        columns["log_prob"] = unknown
        columns.setdefault("entropy", unknown)
        return schema.ENTROPY_TRACE, columns
    influence = tokens("influence")
    columns["captured"] = np.isfinite(influence)
    columns[f"influence_{credit}"] = influence
    return schema.INFLUENCE_TRACE, columns


def _matrix(arrays: SafeNpz, name: str) -> np.ndarray:
    if name not in arrays or len(arrays.members[name].shape) != 2:
        raise UnsafeNpzError(f"{name} is missing or not [responses, tokens]: not a step file of the older format")
    return arrays[name]


def _vector(arrays: SafeNpz, name: str, rows: int) -> np.ndarray:
    if name not in arrays or arrays.members[name].shape != (rows,):
        raise UnsafeNpzError(f"{name} is missing or not [{rows}]")
    return arrays[name]


def _prompts(arrays: SafeNpz, rows: int, first_rows: np.ndarray) -> list[np.ndarray]:
    """One array of ids per group."""
    if "prompt_ids" not in arrays:
        return [np.empty(0, np.int64)] * len(first_rows)
    member = arrays.members["prompt_ids"]
    if member.shape == (rows,):
        wanted = first_rows
    elif member.shape == (len(first_rows),):
        wanted = np.arange(len(first_rows))
    else:
        raise UnsafeNpzError(f"prompt_ids is {member.shape}, expected one per response or one per group")
    if not member.dtype.hasobject:
        raise UnsafeNpzError(f"prompt_ids is {member.dtype}, expected an object array of lists")
    lists = unpickle_id_lists(arrays.raw("prompt_ids")[member.data_start :], member.shape[0])
    return [lists[row] for row in wanted]
