"""Limits of the kernel's own for all that a keeper's programs use together: a cgroup (version 2), where it may be used.

It may where the folder that holds this process's group belongs to its user and passes `memory` and `pids` on: services
and user sessions of systemd with delegation, root. Elsewhere the keeper's looks at /proc are what there is.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


class Group:
    """A group made for this keeper."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Opened before any namespace is entered: the kernel asks for the rights of who opened it.
        self._join = os.open(folder / "cgroup.procs", os.O_WRONLY)
        self._killed = self._kills()

    @staticmethod
    def create(root: Path = ROOT, membership: Path = MEMBERSHIP) -> Group | None:
        """A new group beside this process's own, or None where that is not allowed."""
        lines = membership.read_text().splitlines() if membership.is_file() else []
        own = next((line[len("0::/") :] for line in lines if line.startswith("0::/")), None)
        if own is None or not (root / "cgroup.controllers").is_file():
            return None
        for parent in {(root / own).parent if own else root, root / own}:
            folder = parent / f"gradtrace-{os.getpid()}"
            try:
                controllers = (parent / "cgroup.subtree_control").read_text().split()
                if {"memory", "pids"} <= set(controllers):
                    folder.mkdir()
                    return Group(folder)
            except OSError:
                with contextlib.suppress(OSError):
                    folder.rmdir()
        return None

    def limit(self, memory: int, processes: int) -> None:
        (self.folder / "memory.max").write_text(str(memory))
        (self.folder / "pids.max").write_text(str(processes))
        for name, value in {"memory.swap.max": "0", "memory.oom.group": "1"}.items():
            with contextlib.suppress(OSError):  # not in every kernel
                (self.folder / name).write_text(value)

    def join(self) -> None:
        """Called by a new process: it and all that it starts are in the group."""
        os.write(self._join, b"0")

    def was_killed(self) -> bool:
        """Did the kernel end something for its memory since the last time this was asked?"""
        before, self._killed = self._killed, self._kills()
        return self._killed > before

    def close(self) -> None:
        os.close(self._join)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _kills(self) -> int:
        events = dict(line.split() for line in (self.folder / "memory.events").read_text().splitlines())
        return int(events.get("oom_kill", 0))
