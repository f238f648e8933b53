"""Files of a run: each is whole or not there, and reading never leaves the run.

`atomic_write` puts a file in place by rename; `JsonLines` appends lines and heals a torn tail;
`atomic_directory` does for a folder (a checkpoint) what `atomic_write` does for a file. JSON that we write is
*sealed*: its last key, `check`, is a checksum of the rest, so that a damaged byte is found when reading.
`read_confined` reads plain files of a run alone: no `..`, no symlink out, no pipe in place of a file.

With `fsync` the state also survives a power cut; without, it survives the end of the process at any moment.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TEMPORARY = ".tmp"
_CHECK = "check"


class DamagedError(ValueError):
    """Bytes that are not what was written."""


def atomic_write(path: Path, data: bytes, fsync: bool = False) -> None:
    """Replace `path` by `data`: readers see the old file or the new one, whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            write_all(descriptor, data)
            if fsync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to report
            os.unlink(temporary)
        raise
    if fsync:
        fsync_directory(path.parent)


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def fsync_directory(path: Path) -> None:
    """Make renames inside `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path, fsync: bool = False) -> None:
    """`path` and its parents; with `fsync`, those that are new survive a power cut."""
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    if fsync:
        for folder in new:
            fsync_directory(folder.parent)


def remove_leftovers(folder: Path) -> None:
    """Delete temporary files that a killed process left in `folder`."""
    for leftover in folder.glob(f".*{TEMPORARY}"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_directory(path: Path, fsync: bool = False) -> Iterator[Path]:
    """A folder to fill; on success it becomes `path` (which must not exist), on an error it vanishes."""
    if path.exists():
        raise FileExistsError(f"{path} exists already")
    make_folder(path.parent, fsync)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        if fsync:
            _fsync_tree(temporary)
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if fsync:
        fsync_directory(path.parent)


def _fsync_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            descriptor = os.open(os.path.join(parent, name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        fsync_directory(Path(parent))


def seal(record: dict[str, Any], indent: int | None = None) -> bytes:
    """`record` as JSON with its checksum as the last key, and a newline."""
    if _CHECK in record:
        raise ValueError(f"the key {_CHECK!r} is taken: it holds the checksum")
    # What reading gives back: keys are strings, and there are no tuples.
    plain = json.loads(json.dumps(record, default=plain_number))
    return (json.dumps({**plain, _CHECK: _checksum(plain)}, indent=indent) + "\n").encode()


def unseal(data: bytes, strict: bool = True) -> dict[str, Any]:
    """The record in `data`, or a `DamagedError`. `strict=False` also takes JSON that was never sealed."""
    try:
        record = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"not JSON ({error})") from None
    if not isinstance(record, dict):
        raise DamagedError("not a JSON object")
    check = record.pop(_CHECK, None)
    if check is None and not strict and not _looks_like_seal(record):
        return record
    if check != _checksum(record):
        raise DamagedError("the checksum does not match")
    return record


def plain_number(value: Any) -> Any:
    """NumPy and torch scalars as numbers, for `json.dumps(default=…)`."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def _checksum(record: dict[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}"


def _looks_like_seal(record: dict[str, Any]) -> bool:
    """The last key is a `check` with a damaged letter: such a record was sealed once and is not foreign."""
    if not record:
        return False
    key, value = list(record.items())[-1]
    alike = len(key) == len(_CHECK) and sum(a == b for a, b in zip(key, _CHECK, strict=True)) >= 3
    return alike and isinstance(value, str) and len(value) == 8


class JsonLines:
    """Append-only file of sealed JSON lines, made if it is not there. A line is there with its newline or it does
    not count."""

    def __init__(self, path: Path, fsync: bool = False) -> None:
        self.path = path
        self.fsync = fsync
        self.torn = False
        """The last append failed and its bytes could not be taken back; the next one does that first."""
        self._size = self._heal()

    def append(self, record: dict[str, Any]) -> None:
        line = seal(record)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != self._size:
                os.ftruncate(descriptor, self._size)
            self.torn = True
            try:
                write_all(descriptor, line)
                if self.fsync:
                    os.fsync(descriptor)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, self._size)
                    self.torn = False
                raise
            self.torn = False
            self._size += len(line)
        finally:
            os.close(descriptor)

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drop every line that is not wanted, and damaged ones, in one atomic step."""
        kept = []
        for line in self.path.read_bytes().splitlines(keepends=True):
            try:
                record = unseal(line, strict=False)
            except DamagedError:
                continue
            if wanted(record):
                kept.append(line)
        try:
            atomic_write(self.path, b"".join(kept), self.fsync)
        finally:  # it may fail before the rename or after
            self._size = self.path.read_bytes().rfind(b"\n") + 1

    def _heal(self) -> int:
        """Cut a last line without newline, left by a killed process; return the size."""
        if not self.path.exists():
            atomic_write(self.path, b"", self.fsync)
            return 0
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            os.truncate(self.path, whole)
        return whole


class RefusedError(ValueError):
    """A path that leads out of the run, or to something that is not a plain file."""


def _inside(root: Path, name: str) -> Path:
    resolved = (root / name).resolve()
    if not resolved.is_relative_to(root):
        raise RefusedError(f"leads out of the run, to {resolved}: refused")
    return resolved


def size_confined(root: Path, name: str) -> int | None:
    """Size of the file `name` under `root` (resolved), None if there is none."""
    try:
        return _inside(root, name).stat().st_size
    except FileNotFoundError:
        return None


def read_confined(root: Path, name: str, start: int = 0, limit: int | None = None) -> bytes:
    """Read at most `limit` bytes of file `name` under `root` (resolved), from `start` on."""
    # O_NONBLOCK: opening a pipe must not wait for its other end before we can refuse it
    descriptor = os.open(_inside(root, name), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise RefusedError("not a plain file: refused")
        file.seek(start)
        return file.read() if limit is None else file.read(limit)
