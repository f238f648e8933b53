"""The layout of trace files: which columns a kind has and how they fit together, checked when writing and reading.

A *kind* of trace is a folder in the run (`entropy_trace`, `influence_trace`, `tracin`, `entropy_probe`); each
step of it is one npz file of flat one-dimensional arrays. With G groups (prompts), R responses and N tokens:

    level group      one value per group               [G]
    level response   one value per response            [R]
    level token      one value per response token      [N], response r at token_offsets[r]:token_offsets[r+1]
    level continuation  one value per sampled continuation  [C]
    level segment    one value per segment of a response that one author wrote
    level pairwise   effect of a token on a response   blocks [T_r, n_r], row-major, one per response
    level meta       about the file

A ragged column is flat and names the offsets column that cuts it; offsets start at 0 and end at its length.
Nothing is padded and nothing is pickled. Indices (`group`, `pairwise_member`) point into the same file. The columns
themselves are described in `gradtrace.trace.kinds`, in the record of the instrument that brings them.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import numpy as np

# Names that users of the schema look for here.
from gradtrace.trace.kinds.blame import BLAME as BLAME
from gradtrace.trace.kinds.counterfactual import COUNTERFACTUAL as COUNTERFACTUAL
from gradtrace.trace.kinds.entropy_probe import ENTROPY_PROBE as ENTROPY_PROBE
from gradtrace.trace.kinds.entropy_probe import ProbeBatch as ProbeBatch
from gradtrace.trace.kinds.entropy_trace import ENTROPY_TRACE as ENTROPY_TRACE
from gradtrace.trace.kinds.influence_trace import INFLUENCE_TRACE as INFLUENCE_TRACE
from gradtrace.trace.kinds.influence_trace import PAIRWISE
from gradtrace.trace.kinds.shared import SIGN_STATEMENT as SIGN_STATEMENT
from gradtrace.trace.kinds.shared import GroupStatus as GroupStatus
from gradtrace.trace.kinds.shared import SegmentRole as SegmentRole
from gradtrace.trace.kinds.shared import Selection as Selection
from gradtrace.trace.kinds.tracin import TRACIN as TRACIN
from gradtrace.trace.kinds.tracin import TracinReason as TracinReason
from gradtrace.trace.record import COLUMNS, KINDS, Column

FORMAT_VERSION = 1

COUNTED_BY = {
    "group": "group_id",
    "response": "group",
    "continuation": "continuation_response",
    "segment": "segment_start",
    "reward_part": "reward_part",
}
"""For each level: the column that every file with something of that level has, one value each."""

# Columns that another column of the same file decides, filled in when the caller leaves them out.
_MADE_FROM = {"token_offsets": "length", "length": "token_offsets"}


class SchemaError(ValueError):
    """A column that does not fit. `column` is its name."""

    def __init__(self, column: str, message: str) -> None:
        super().__init__(f"column {column!r}: {message}")
        self.column = column


def ragged(rows: list[np.ndarray] | list[list[int]], dtype: str = "int32") -> tuple[np.ndarray, np.ndarray]:
    """Rows of different lengths as (flat [sum of lengths], offsets int64[len(rows) + 1])."""
    offsets = offsets_of(np.array([len(row) for row in rows], dtype=np.int64))
    flat = np.concatenate([np.asarray(row, dtype=dtype) for row in rows]) if len(rows) else np.empty(0, dtype)
    return flat.astype(dtype, copy=False), offsets


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Offsets int64[n + 1] of parts with these lengths: 0, then the running sum."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def conform(kind: str, columns: Mapping[str, object]) -> dict[str, np.ndarray]:
    """`columns` as fresh arrays of the schema's dtypes, complete and consistent, or a `SchemaError`."""
    allowed = KINDS[kind].columns
    arrays: dict[str, np.ndarray] = {}
    for name, value in columns.items():
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise SchemaError(name, f"{kind} has no such column{hint}")
        arrays[name] = _cast(COLUMNS[name], value)
    for target, source in _MADE_FROM.items():
        if target not in arrays and source in arrays:
            made = offsets_of(arrays[source]) if target == "token_offsets" else np.diff(arrays[source])
            arrays[target] = made.astype(COLUMNS[target].dtype)
    lengths = {name: len(array) for name, array in arrays.items()}
    check_layout(kind, lengths)
    check_values(lengths, arrays)
    return {name: arrays[name] for name in allowed if name in arrays}


def _cast(column: Column, value: object) -> np.ndarray:
    """A copy in the column's dtype: the caller may reuse its buffers while we write."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # torch: bfloat16, on a GPU, with gradient
        raise SchemaError(column.name, f"cannot become a NumPy array ({error})") from None
    wanted = np.dtype(column.dtype)
    if array.ndim != 1:
        raise SchemaError(column.name, f"is {array.ndim}-dimensional, columns are flat")
    if array.size == 0:
        return np.empty(0, wanted)
    fits = np.can_cast(array.dtype, wanted, "same_kind") or (array.dtype.kind in "iu" and wanted.kind in "iu")
    if not fits:
        raise SchemaError(column.name, f"is {array.dtype}, expected {wanted}")
    if array.dtype.kind in "iu" and wanted.kind in "iu" and not np.can_cast(array.dtype, wanted, "safe"):
        limits = np.iinfo(wanted)
        if array.min() < limits.min or array.max() > limits.max:
            raise SchemaError(column.name, f"has values outside {wanted}")
    return np.array(array, dtype=wanted)


def check_layout(kind: str, lengths: Mapping[str, int]) -> None:
    """Every required column is there and the columns of one level have one length."""
    spec = KINDS[kind]
    for name in spec.required:
        if name not in lengths:
            raise SchemaError(name, f"is missing, {kind} needs it")
    if spec.one_of and not any(name in lengths for name in spec.one_of):
        raise SchemaError(spec.one_of[0], f"is missing, {kind} needs at least one of {', '.join(spec.one_of)}")
    rows = {level: lengths[name] for level, name in COUNTED_BY.items() if name in lengths}
    for name, length in lengths.items():
        column = COLUMNS[name]
        if column.ragged_by:
            if column.ragged_by not in lengths:
                raise SchemaError(name, f"is ragged and its {column.ragged_by} is missing")
        elif column.level in rows:
            expected = rows[column.level] + int(column.is_offsets)
            if length != expected:
                raise SchemaError(
                    name, f"has {length} entries, expected {expected} ({rows[column.level]} {column.level}s)"
                )


def check_values(lengths: Mapping[str, int], arrays: Mapping[str, np.ndarray]) -> None:
    """Offsets cut their columns exactly, indices point at something, blocks have the size their lists say.
    Reads offsets, indices and enums only, so that a lazy `arrays` need not decode the rest."""
    for name in lengths:
        column = COLUMNS[name]
        if column.is_offsets and (arrays[name][0] != 0 or (np.diff(arrays[name]) < 0).any()):
            raise SchemaError(name, "offsets must start at 0 and never fall")
        if column.values and len(arrays[name]) and arrays[name].max() > max(column.values):
            raise SchemaError(name, f"has a value that {column.values.__name__} does not name")
    for name, length in lengths.items():
        by = COLUMNS[name].ragged_by
        if by and length != arrays[by][-1]:
            raise SchemaError(name, f"has {length} entries, {by} ends at {arrays[by][-1]}")
    if not np.array_equal(np.diff(arrays["token_offsets"]), arrays["length"]):
        raise SchemaError("length", "does not agree with token_offsets")
    for name in lengths:
        if level := COLUMNS[name].points_at:
            index, size = arrays[name], lengths[COUNTED_BY[level]]
            if len(index) and (index.min() < 0 or index.max() >= size):
                raise SchemaError(name, f"points outside the {size} entries of this file")
    if any(name in lengths for name in PAIRWISE):
        for name in PAIRWISE:
            if name not in lengths:
                raise SchemaError(name, "is missing; the pairwise columns come together")
        # a response without a list has no block; one with a list has a [T_r, n_r] block
        blocks = arrays["length"].astype(np.int64) * np.diff(arrays["pairwise_member_offsets"])
        if not np.array_equal(np.diff(arrays["pairwise_offsets"]), blocks):
            raise SchemaError("pairwise_offsets", "a block is not length × number of members")
