"""A disk that fails on demand: every open for writing, write, fsync, rename, unlink and truncate under one folder
is counted, and the i-th one fails, or the process ends there, or the power goes.

    kill_before   the process ends before the operation
    kill_torn     a write writes half and then the process ends; any other operation happens first
    power         the process ends and everything that was not fsynced is lost: data, new names, renames, removals
    enospc, eio   the operation fails (a write writes half first); later ones work
    full          as enospc, and every later open and write fails too
    short         a write writes half and says so, which is no error
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

KILLS = ("kill_before", "kill_torn", "power")
KILLED = 77


class FaultyDisk:
    def __init__(self, folder: Path, mode: str, fail_at: int) -> None:
        self.folder = os.path.realpath(folder)
        self.mode = mode
        self.fail_at = fail_at
        self.count = 0
        self.log: list[str] = []
        self.paths: dict[int, str] = {}  # open descriptors
        self.synced_size: dict[str, int] = {}  # files with data that is not on the disk yet: size that is
        self.undo: list[tuple[str, Callable[[], None]]] = []  # (folder, how to undo a name change there)
        self.real = {name: getattr(os, name) for name in self._names()}

    @staticmethod
    def _names() -> list[str]:
        return ["open", "write", "fsync", "replace", "unlink", "ftruncate", "truncate", "close", "mkdir"]

    def install(self) -> None:
        for name in self._names():
            setattr(os, name, getattr(self, name))

    def _inside(self, path: Any) -> bool:
        # not realpath: that would call what we patched
        return isinstance(path, str | os.PathLike) and os.path.abspath(path).startswith(self.folder)

    def _step(self, what: str, half: Callable[[], Any], whole: Callable[[], Any]) -> Any:
        """Count one operation and let it happen, or not."""
        self.count += 1
        if self.count < self.fail_at or (self.count > self.fail_at and self.mode != "full"):
            return whole()
        self.log.append(what)
        if self.mode == "short":
            return half()
        if self.mode == "kill_before":
            os._exit(KILLED)
        if self.mode == "kill_torn":
            try:
                half()
            finally:
                os._exit(KILLED)
        if self.mode == "power":
            try:
                self._power_cut()
            finally:
                os._exit(KILLED)
        if self.mode == "full" and not what.startswith(("open", "write", "mkdir")):
            return whole()
        if what.startswith("write"):
            half()
        raise OSError(errno.EIO if self.mode == "eio" else errno.ENOSPC, os.strerror(errno.EIO), what)

    def _power_cut(self) -> None:
        for name, function in self.real.items():
            setattr(os, name, function)
        for path, size in self.synced_size.items():
            if os.path.exists(path):
                os.truncate(path, size)
        for _, undo in reversed(self.undo):
            undo()

    def open(self, path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        if not self._inside(path) or not writes:
            descriptor = self.real["open"](path, flags, mode, **more)
            if flags & os.O_DIRECTORY:
                self.paths[descriptor] = os.path.abspath(path)
            return descriptor
        name = os.path.abspath(path)

        def whole() -> int:
            if not os.path.exists(name):
                self.undo.append((os.path.dirname(name), lambda: Path(name).unlink(missing_ok=True)))
            descriptor = self.real["open"](path, flags, mode, **more)
            self.paths[descriptor] = name
            return descriptor

        return self._step(f"open {name}", whole, whole)

    def close(self, descriptor: int) -> None:
        self.paths.pop(descriptor, None)
        self.real["close"](descriptor)

    def write(self, descriptor: int, data: Any) -> int:
        name = self.paths.get(descriptor)
        if name is None:
            return self.real["write"](descriptor, data)
        self.synced_size.setdefault(name, os.fstat(descriptor).st_size)
        half = max(1, len(data) // 2)
        return self._step(
            f"write {name}",
            lambda: self.real["write"](descriptor, data[:half]),
            lambda: self.real["write"](descriptor, data),
        )

    def fsync(self, descriptor: int) -> None:
        name = self.paths.get(descriptor)

        def whole() -> None:
            # not the real thing, which is slow: what matters is what `power` loses
            self.synced_size.pop(name or "", None)
            self.undo = [(folder, undo) for folder, undo in self.undo if folder != name]

        if name is None:
            return self.real["fsync"](descriptor)
        return self._step(f"fsync {name}", whole, whole)

    def replace(self, source: Any, target: Any) -> None:
        if not self._inside(target):
            return self.real["replace"](source, target)
        source, target = os.path.abspath(source), os.path.abspath(target)

        def whole() -> None:
            before = Path(target).read_bytes() if Path(target).is_file() else None
            if source in self.synced_size:
                self.synced_size[target] = self.synced_size.pop(source)
            self.real["replace"](source, target)

            def undo() -> None:
                if before is None:
                    Path(target).unlink(missing_ok=True)
                else:
                    Path(target).write_bytes(before)

            self.undo.append((os.path.dirname(target), undo))

        return self._step(f"replace {target}", whole, whole)

    def unlink(self, path: Any, **more: Any) -> None:
        if not self._inside(path):
            return self.real["unlink"](path, **more)
        name = os.path.abspath(path)

        def whole() -> None:
            before = Path(name).read_bytes() if os.path.exists(name) else None
            self.real["unlink"](path, **more)
            if before is not None:
                self.undo.append((os.path.dirname(name), lambda: Path(name).write_bytes(before) and None))

        return self._step(f"unlink {name}", whole, whole)

    def ftruncate(self, descriptor: int, size: int) -> None:
        def whole() -> None:
            self.real["ftruncate"](descriptor, size)

        return self._step(f"ftruncate {self.paths.get(descriptor)}", whole, whole)

    def truncate(self, path: Any, size: int) -> None:
        def whole() -> None:
            self.real["truncate"](path, size)

        return self._step(f"truncate {path}", whole, whole)

    def mkdir(self, path: Any, mode: int = 0o777, **more: Any) -> None:
        if not self._inside(path):
            return self.real["mkdir"](path, mode, **more)
        name = os.path.abspath(path)

        def whole() -> None:
            self.real["mkdir"](path, mode, **more)
            self.undo.append((os.path.dirname(name), lambda: shutil.rmtree(name)))

        return self._step(f"mkdir {name}", whole, whole)
