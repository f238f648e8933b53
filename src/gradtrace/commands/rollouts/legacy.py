"""Convert the older trace format: one npz per step with padded arrays, prompts as a pickled object array.

Arrays of a step (N responses padded to T tokens): `responses` int[N, T], `response_mask` [N, T], `reward` [N],
`accepted` bool[N], `group_id` [N] (numbers or strings), `prompt_ids` object[N] (or one per group), and
`influence` float[N, T], `entropies` float[N, T]. Other arrays are left alone, and never unpickled.

A pickle is a program. That of the prompts may only build lists, integers and NumPy integer arrays: its operations are
checked against a list, every name it asks for is replaced by an inert stand-in that merely remembers its arguments, and
what comes out is checked again. The pure-Python unpickler is used because the C one can be made to allocate gigabytes
by a few bytes of input.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gradtrace.errors import GradtraceError
from gradtrace.instruments.entropy_trace import ENTROPY_TRACE
from gradtrace.instruments.influence import INFLUENCE_TRACE
from gradtrace.trace.columns import SIGN_STATEMENT, GroupStatus, SchemaError, Selection, ragged
from gradtrace.trace.files import RefusedError, read_confined
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
            except (UnsafeNpzError, RefusedError, SchemaError) as error:
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
    if kind == INFLUENCE_TRACE:
        meta |= {"credit": [credit], "sign": SIGN_STATEMENT}
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
    prompts, prompt_offsets = ragged([*_prompts(arrays, rows, first_rows)], "int64")
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
            GroupStatus.CONSTANT_REWARD
            if len(set(reward[group.reshape(-1) == g].tolist())) == 1
            else GroupStatus.SCORED
            for g in range(len(group_ids))
        ],
        "selection": np.full(rows, Selection.SELECTED),
        "optimizer_step": np.full(rows, -1),
    }
    if "entropies" in arrays:
        columns["entropy"] = tokens("entropies")
    if "influence" not in arrays:
        unknown = np.full(len(columns["token_id"]), np.nan, np.float32)
        columns["log_prob"] = unknown
        columns.setdefault("entropy", unknown)
        return ENTROPY_TRACE, columns
    influence = tokens("influence")
    columns["captured"] = np.isfinite(influence)
    columns[f"influence_{credit}"] = influence
    return INFLUENCE_TRACE, columns


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


# ---------------------------------------------------------------- ids out of the pickle

# what pickling lists of integers and NumPy arrays needs, in protocols 3 (NumPy 1), 4 (NumPy 2) and 5
_OPERATIONS = {
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "LONG1"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    *("EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"),
    *("GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD"),
}
_INTEGERS = {f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)} | {"b1"}


class _StandIn:
    """Stands in place of `ndarray`, `dtype` and the functions that make them; it remembers its arguments and does
    nothing."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: tuple[Any, ...] = ()) -> None:
        self.name = name
        self.arguments = arguments
        self.state: Any = None

    def __call__(self, *arguments: Any) -> _StandIn:
        return _StandIn(self.name, arguments)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        plain = module.replace("numpy.core.", "numpy._core.")
        known = {
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "scalar"),
            ("numpy._core.numeric", "_frombuffer"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
        }
        if (plain, name) not in known:
            raise UnsafeNpzError(f"the pickle asks for {module}.{name}: refused")
        return _StandIn(name)


def unpickle_id_lists(data: bytes, rows: int) -> list[np.ndarray]:
    """`rows` arrays of ids (int64) from the pickle of an object array of lists or integer arrays."""
    try:
        for operation, _, _ in pickletools.genops(data):
            if operation.name not in _OPERATIONS:
                raise UnsafeNpzError(f"the pickle uses {operation.name}: refused")
        loaded = _Unpickler(io.BytesIO(data)).load()
    except UnsafeNpzError:
        raise
    except Exception as error:  # a hostile pickle can make the unpickler fail in any way it likes
        raise UnsafeNpzError(f"the pickle is damaged ({type(error).__name__}: {error})") from None
    elements = _object_elements(loaded)
    if len(elements) != rows:
        raise UnsafeNpzError(f"the pickle holds {len(elements)} prompts, its header says {rows}")
    return [_ids(element) for element in elements]


def _object_elements(loaded: Any) -> list[Any]:
    """ndarray.__setstate__ gets (version, shape, dtype, fortran, list of elements)."""
    state = loaded.state if isinstance(loaded, _StandIn) and loaded.name == "_reconstruct" else None
    if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[4], list):
        raise UnsafeNpzError("the pickle is not an object array")
    return state[4]


def _ids(element: Any) -> np.ndarray:
    if isinstance(element, list):
        try:
            return np.array([_integer(value) for value in element], np.int64)
        except OverflowError:
            raise UnsafeNpzError("a token id in the pickle does not fit 64 bits") from None
    if isinstance(element, _StandIn) and element.name == "_reconstruct":
        return _array(element.state)
    if isinstance(element, _StandIn) and element.name == "_frombuffer":
        data, dtype, shape, _ = _exactly(element.arguments, 4)  # protocol 5: (buffer, dtype, shape, order)
        return _array((1, shape, dtype, False, data))
    raise UnsafeNpzError(f"a prompt in the pickle is a {type(element).__name__}, not a list of ids")


def _integer(value: Any) -> int:
    if type(value) is int:
        return value
    if isinstance(value, _StandIn) and value.name == "scalar":  # np.int64(7): (dtype, its bytes)
        dtype, data = _exactly(value.arguments, 2)
        return int(_array((1, (1,), dtype, False, data))[0])
    raise UnsafeNpzError(f"a token id in the pickle is a {type(value).__name__}")


def _array(state: Any) -> np.ndarray:
    _, shape, dtype, _, data = _exactly(state, 5)
    code = dtype.arguments[0] if isinstance(dtype, _StandIn) and dtype.arguments else None
    if code not in _INTEGERS or not isinstance(data, bytes | bytearray) or not isinstance(shape, tuple):
        raise UnsafeNpzError("an array in the pickle does not hold integers")
    order = dtype.state[1] if isinstance(dtype.state, tuple) and len(dtype.state) > 1 else "<"
    kind = np.dtype(code).newbyteorder(">" if order == ">" else "<")
    if any(type(extent) is not int or extent < 0 for extent in shape) or len(shape) != 1:
        raise UnsafeNpzError(f"an array in the pickle has shape {shape}")
    if math.prod(shape) * kind.itemsize != len(data):
        raise UnsafeNpzError(f"an array in the pickle declares {shape} and holds {len(data)} bytes")
    return np.frombuffer(data, kind).astype(np.int64)


def _exactly(values: Any, count: int) -> tuple[Any, ...]:
    if not isinstance(values, tuple) or len(values) != count:
        raise UnsafeNpzError("an array in the pickle has no known form")
    return values
