"""Who writes a run: `RUN/.lock`, held by that process as long as it lives, and told to the next who tries.

The kernel lets go of the lock when the process ends, however it ends. A job on verl has two writers, the launcher and
verl's driver, which may outlive it: the driver holds a lock of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from gradtrace.errors import GradtraceError

LOCK = ".lock"
DRIVER = ".lock.driver"
PAUSE = 0.05
PATIENCE = {LOCK: 0.5, DRIVER: 30.0}
"""Seconds in which a lock is tried again. Who only looks whether it is held has it for a moment, and a driver that is
started anew comes while Ray still ends the one before it."""
_held: dict[Path, list[int]] = {}
"""By file: its descriptor, how often this process took it, and this process (a fork has no part in it)."""


def acquire(run_dir: Path, name: str = LOCK) -> None:
    """Become the writer of a run, which may be one's own already; GradtraceError that says who is."""
    path = (run_dir / name).absolute()
    if path in _held and _held[path][2] == os.getpid():
        _held[path][1] += 1
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    until = time.monotonic() + PATIENCE[name]
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > until:
                os.close(descriptor)
                raise GradtraceError(f"{run_dir} is being written by {holder(run_dir, name)}.") from None
            time.sleep(PAUSE)
        except OSError:  # a file system without locks
            break
    about = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": " ".join(sys.argv)[:500],
    }
    os.ftruncate(descriptor, 0)
    os.write(descriptor, json.dumps(about).encode())
    _held[path] = [descriptor, 1, os.getpid()]


def release(run_dir: Path, name: str = LOCK) -> None:
    """Give the lock back: once for every time that it was taken."""
    path = (run_dir / name).absolute()
    if path not in _held or _held[path][2] != os.getpid():
        return
    _held[path][1] -= 1
    if not _held[path][1]:
        os.close(_held.pop(path)[0])


def is_held(run_dir: Path) -> bool:
    """Does a living process write this run?"""
    return any(_is_held(run_dir / name) for name in (LOCK, DRIVER))


def refuse_driver(run_dir: Path) -> None:
    """A job's driver may still write after its launcher was killed."""
    if _is_held(run_dir / DRIVER):
        raise GradtraceError(f"{run_dir} is still being written by {holder(run_dir, DRIVER)}.")


def holder(run_dir: Path, name: str = LOCK) -> str:
    """Say in words which process holds the lock."""
    about: Any = None
    with contextlib.suppress(OSError, ValueError):
        about = json.loads((run_dir / name).read_text())
    if not isinstance(about, dict):
        return "another process"
    return (
        f"process {about.get('pid')} on {about.get('host')} (`{about.get('command')}`, since {about.get('since')}); "
        "wait for it to end, or stop it"
    )


def _is_held(path: Path) -> bool:
    if path.absolute() in _held:
        return True
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
