"""npz without trust: sizes, names and dtypes are checked before anything is allocated; nothing is unpickled.

A file from elsewhere may declare an array of a petabyte, a kilobyte that inflates to gigabytes, a member
named `../../x`, or an object array whose pickle runs code. Reading here fails with `UnsafeNpzError` instead.
"""

from __future__ import annotations

import io
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.lib import format as npy

MAX_MEMBERS = 256
MAX_TOTAL_BYTES = 4 << 30
# zeros deflate about 1000 to 1, a whole step file never does: floats are stored as they are
MAX_RATIO = 100
SMALL_FILE = 16 << 20
_MEMBER = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}\.npy")
_MAX_HEADER = 4096
_READ_AT_ONCE = 64 << 10
_HEADER = re.compile(
    rb"\{'descr': '([<|][biuf][1-8]|<U\d{1,4}|\|O)', 'fortran_order': (True|False), "
    rb"'shape': \(((?:\d{1,18}, ?)*\d{0,18})\), \} *\n"
)


class UnsafeNpzError(ValueError):
    """A file that is damaged or that we refuse to read."""


@dataclass(frozen=True)
class Member:
    """What an array's header declares, checked against the size of its data."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    data_start: int


class SafeNpz(Mapping[str, np.ndarray]):
    """Arrays of an npz held in memory, decoded when asked for. Keys are the array names."""

    def __init__(self, data: bytes, list_pickled: bool = False, max_ratio: int = MAX_RATIO) -> None:
        """`list_pickled`: object arrays are listed in `members` and never decoded here, instead of a refusal.
        `max_ratio`: how many times bigger than `data` the arrays may be."""
        self._zip = _open_zip(data, max_ratio)
        self._infos = {info.filename.removesuffix(".npy"): info for info in self._zip.infolist()}
        self._content: dict[str, bytes] = {}
        self._arrays: dict[str, np.ndarray] = {}
        self.members = {name: self._read_header(name, list_pickled) for name in self._infos}

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._arrays:
            member = self.members[name]
            if member.dtype.hasobject:
                raise UnsafeNpzError(f"array {name!r} is pickled")
            array = np.frombuffer(self.raw(name), member.dtype, offset=member.data_start)
            self._arrays[name] = array.reshape(member.shape)
        return self._arrays[name]

    def __contains__(self, name: object) -> bool:
        return name in self.members  # Mapping's own would decode the array

    def __iter__(self) -> Iterator[str]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def raw(self, name: str) -> bytes:
        """The member's bytes, npy header included; its checksum is verified."""
        if name in self._content:
            return self._content[name]
        return self._read(name, self._infos[name].file_size)

    def _read(self, name: str, limit: int) -> bytes:
        """Read at most `limit` bytes: without one, zipfile inflates everything before it looks at the declared size."""
        try:
            with self._zip.open(self._infos[name]) as member:
                return member.read(limit)
        # what zipfile and zlib raise on damaged input; RuntimeError is "encrypted"
        except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError, struct.error) as error:
            raise UnsafeNpzError(f"array {name!r}: {error}") from None

    def _read_header(self, name: str, list_pickled: bool) -> Member:
        size = self._infos[name].file_size
        if size <= _READ_AT_ONCE:
            head = self._content[name] = self._read(name, size)
        else:
            head = self._read(name, _MAX_HEADER)
        member = _parse_header(name, head)
        if member.dtype.hasobject:
            if not list_pickled:
                raise UnsafeNpzError(f"array {name!r} is pickled: refused")
            return member
        declared = math.prod(member.shape) * member.dtype.itemsize
        if member.data_start + declared != size:
            raise UnsafeNpzError(
                f"array {name!r} declares {member.shape} {member.dtype}, {declared} bytes, "
                f"and holds {size - member.data_start}"
            )
        return member


def _parse_header(name: str, head: bytes) -> Member:
    """Read only what `np.save` writes for flat and rectangular arrays: a pattern, not an expression to evaluate."""
    start = 10 if head[6:8] == b"\x01\x00" else 12
    length = int.from_bytes(head[8:start], "little")
    match = _HEADER.fullmatch(head[start : start + length])
    if head[:6] != b"\x93NUMPY" or head[6:8] not in (b"\x01\x00", b"\x02\x00") or match is None:
        raise UnsafeNpzError(f"array {name!r}: not the header of a plain array")
    descr, fortran_order, extents = (part.decode() for part in match.groups())
    shape = tuple(int(extent) for extent in extents.split(",") if extent.strip())
    if fortran_order == "True" and len(shape) > 1:
        raise UnsafeNpzError(f"array {name!r} is in Fortran order")
    try:
        dtype = np.dtype(descr)
    except TypeError:
        raise UnsafeNpzError(f"array {name!r} has dtype {descr}") from None
    return Member(name, dtype, shape, start + length)


def _open_zip(data: bytes, max_ratio: int) -> zipfile.ZipFile:
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error, OSError) as error:
        raise UnsafeNpzError(f"not an npz file ({error})") from None
    infos = archive.infolist()
    if len(infos) > MAX_MEMBERS:
        raise UnsafeNpzError(f"{len(infos)} arrays, more than {MAX_MEMBERS}")
    seen: set[str] = set()
    for info in infos:
        if not _MEMBER.fullmatch(info.filename):
            raise UnsafeNpzError(f"member name {info.filename[:80]!r} is not that of an array")
        if info.filename in seen:
            raise UnsafeNpzError(f"two members are named {info.filename!r}")
        seen.add(info.filename)
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise UnsafeNpzError(f"{info.filename!r} uses compression {info.compress_type}")
    total = sum(info.file_size for info in infos)
    if total > MAX_TOTAL_BYTES or total > max(SMALL_FILE, max_ratio * len(data)):
        raise UnsafeNpzError(f"{len(data)} bytes declare {total} bytes of arrays: refused as a zip bomb")
    if sum(info.compress_size for info in infos) > len(data):
        raise UnsafeNpzError("members overlap")
    return archive


def dump_npz(arrays: Mapping[str, np.ndarray]) -> bytes:
    """An npz, the same bytes for the same arrays. Whole numbers and flags are deflated, floats are stored as they
    are. Measured on 19,608 tokens: everything stored 21.5 bytes a token in 1.0 ms; this 18.1 bytes in 2.6 ms;
    everything deflated 16.9 bytes in 11.5 ms."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in arrays.items():
            info = zipfile.ZipInfo(f"{name}.npy")  # its date is 1980 unless told: reproducible
            info.compress_type = zipfile.ZIP_STORED if array.dtype.kind == "f" else zipfile.ZIP_DEFLATED
            content = io.BytesIO()
            npy.write_array(content, np.ascontiguousarray(array), allow_pickle=False)
            archive.writestr(info, content.getbuffer(), compresslevel=1)
    return buffer.getvalue()
