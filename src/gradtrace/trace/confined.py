"""Read files of a run and nothing outside it: no `..`, no symlink out, no pipe in place of a file."""

from __future__ import annotations

import os
import stat
from pathlib import Path


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
