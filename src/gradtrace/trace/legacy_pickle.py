"""Lists of token ids out of the pickle of a NumPy object array, without running anything that the pickle names.

A pickle is a program. This one may only build lists, integers and NumPy integer arrays: its operations are checked
against a list, every name it asks for is replaced by an inert stand-in that merely remembers its arguments, and
what comes out is checked again. The pure-Python unpickler is used because the C one can be made to allocate
gigabytes by a few bytes of input.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from typing import Any

import numpy as np

from gradtrace.trace.safe_npz import UnsafeNpzError

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
