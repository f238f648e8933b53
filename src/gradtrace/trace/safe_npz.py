"""npz without trust: sizes, names and dtypes are checked before anything is allocated; nothing is unpickled.

A file from elsewhere may declare an array of a petabyte, a kilobyte that inflates to gigabytes, a member
named `../../x`, or an object array whose pickle runs code. Reading here fails with `UnsafeNpzError` instead.
"""

from __future__ import annotations

import io
import re
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
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

    def __init__(self, data: bytes, allow_object: frozenset[str] = frozenset()) -> None:
        """`allow_object`: names that may be object arrays; those are listed, and never decoded here."""
        self._zip = _open_zip(data)
        self._infos = {info.filename.removesuffix(".npy"): info for info in self._zip.infolist()}
        self.members = {
            name: _read_header(self._zip, info, allow_object=name in allow_object)
            for name, info in self._infos.items()
        }
        self._arrays: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._arrays:
            member = self.members[name]
            if member.dtype.hasobject:
                raise UnsafeNpzError(f"array {name!r} is pickled")
            content = self.raw(name)
            array = np.frombuffer(content, member.dtype, offset=member.data_start)
            self._arrays[name] = array.reshape(member.shape)
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def raw(self, name: str) -> bytes:
        """The member's bytes, header included; its checksum is verified."""
        return guarded(lambda: self._zip.read(self._infos[name]), f"array {name!r}")


def guarded(read: Callable[[], bytes], what: str) -> bytes:
    """Errors that zipfile and zlib raise on damaged input, as ours."""
    try:
        return read()
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, struct.error) as error:
        raise UnsafeNpzError(f"{what}: {error}") from None
    except RuntimeError as error:  # "encrypted, password required"
        raise UnsafeNpzError(f"{what}: {error}") from None


def _open_zip(data: bytes) -> zipfile.ZipFile:
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
    if total > MAX_TOTAL_BYTES or total > max(SMALL_FILE, MAX_RATIO * len(data)):
        raise UnsafeNpzError(f"{len(data)} bytes declare {total} bytes of arrays: refused as a zip bomb")
    if sum(info.compress_size for info in infos) > len(data):
        raise UnsafeNpzError("members overlap")
    return archive


def _read_header(archive: zipfile.ZipFile, info: zipfile.ZipInfo, allow_object: bool) -> Member:
    name = info.filename.removesuffix(".npy")
    head = guarded(lambda: archive.open(info).read(_MAX_HEADER + 16), f"array {name!r}")
    stream = io.BytesIO(head)
    try:
        version = npy.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"npy version {version}")
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran_order, dtype = read(stream, max_header_size=_MAX_HEADER)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError, tokenize.TokenError) as error:
        raise UnsafeNpzError(f"array {name!r}: bad npy header ({str(error)[:200]})") from None
    if dtype.hasobject and not allow_object:
        raise UnsafeNpzError(f"array {name!r} is pickled: refused")
    if not dtype.hasobject:
        if dtype.kind not in "biuf" or dtype.names or dtype.subdtype:
            raise UnsafeNpzError(f"array {name!r} has dtype {dtype}")
        if fortran_order and len(shape) > 1:
            raise UnsafeNpzError(f"array {name!r} is in Fortran order")
        count = 1
        for extent in shape:
            if extent < 0:
                raise UnsafeNpzError(f"array {name!r} declares shape {shape}")
            count *= int(extent)
        if stream.tell() + count * dtype.itemsize != info.file_size:
            raise UnsafeNpzError(
                f"array {name!r} declares {shape} {dtype}, {count * dtype.itemsize} bytes, "
                f"and holds {info.file_size - stream.tell()}"
            )
    return Member(name, dtype, tuple(int(extent) for extent in shape), stream.tell())


def dump_npz(arrays: Mapping[str, np.ndarray]) -> bytes:
    """An npz, the same bytes for the same arrays. Whole numbers and flags are deflated lightly: they shrink
    a lot for little time; floats are stored as they are: they hardly shrink and take ten times as long."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in arrays.items():
            info = zipfile.ZipInfo(f"{name}.npy")  # its date is 1980 unless told: reproducible
            info.compress_type = zipfile.ZIP_STORED if array.dtype.kind == "f" else zipfile.ZIP_DEFLATED
            content = io.BytesIO()
            npy.write_array(content, np.ascontiguousarray(array), allow_pickle=False)
            archive.writestr(info, content.getbuffer(), compresslevel=1)
    return buffer.getvalue()
