"""The files of a run that are not traces: config.yaml, metrics.jsonl, summary.json, token_bytes.npz, run.log, .lock.

`RUN/.lock` is held by the process that writes the run, as long as it lives, and tells the next who tries. The kernel
lets go of it when the process ends, however it ends. A job on verl has two writers, the launcher and verl's driver,
which may outlive it: the driver holds a lock of its own.

Traces are in the run's folder, or in another one that `trainer.trace_dir` names. Then the run has a file that names
that folder, and the folder has one that names the run. Readers follow the first only where the second answers it: a run
that one was given cannot make them look anywhere else.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import logging
import os
import shutil
import socket
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gradtrace.errors import GradtraceError
from gradtrace.trace.columns import KINDS
from gradtrace.trace.files import (
    JsonLines,
    RefusedError,
    atomic_write,
    make_folder,
    read_confined,
    remove_leftovers,
    seal,
)
from gradtrace.trace.token_text import TokenBytes

LOCK = ".lock"
DRIVER_LOCK = ".lock.driver"
PAUSE = 0.05
PATIENCE = {LOCK: 0.5, DRIVER_LOCK: 30.0}
"""Seconds in which a lock is tried again. Who only looks whether it is held has it for a moment, and a driver that is
started anew comes while Ray still ends the one before it."""
_held: dict[Path, list[int]] = {}
"""By file: its descriptor, how often this process took it, and this process (a fork has no part in it)."""


def acquire_lock(run_dir: Path, name: str = LOCK) -> None:
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
                raise GradtraceError(f"{run_dir} is being written by {lock_holder(run_dir, name)}.") from None
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


def release_lock(run_dir: Path, name: str = LOCK) -> None:
    """Give the lock back: once for every time that it was taken."""
    path = (run_dir / name).absolute()
    if path not in _held or _held[path][2] != os.getpid():
        return
    _held[path][1] -= 1
    if not _held[path][1]:
        os.close(_held.pop(path)[0])


def is_held(run_dir: Path) -> bool:
    """Does a living process write this run?"""
    return any(_is_held(run_dir / name) for name in (LOCK, DRIVER_LOCK))


def refuse_driver(run_dir: Path) -> None:
    """A job's driver may still write after its launcher was killed."""
    if _is_held(run_dir / DRIVER_LOCK):
        raise GradtraceError(f"{run_dir} is still being written by {lock_holder(run_dir, DRIVER_LOCK)}.")


def lock_holder(run_dir: Path, name: str = LOCK) -> str:
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


POINTER = "trace_dir.txt"
"""In the run: the folder of its traces."""
OWNER = "traces_of.txt"
"""In that folder: the run."""
LONGEST = 4096


def place_traces(run_dir: Path, trace_dir: str) -> Path:
    """The folder for the traces of a run that begins or goes on: the run's own, or TRACE_DIR/NAME, which is made."""
    run_dir = run_dir.resolve()
    known = named_by(run_dir)
    wanted = Path(trace_dir).expanduser().absolute() / run_dir.name if trace_dir else None
    has_traces = any((run_dir / kind).exists() for kind in KINDS)
    if (known != wanted and known is not None) or (wanted is not None and known is None and has_traces):
        raise GradtraceError(
            f"trainer.trace_dir={trace_dir}: the traces of this run are in {known or run_dir}, and a run has one place "
            "for them. Leave trainer.trace_dir as it was."
        )
    if wanted is None:
        return run_dir
    owner = read_line(wanted, OWNER)
    if owner not in (None, str(run_dir)):
        raise GradtraceError(
            f"trainer.trace_dir={trace_dir}: {wanted} holds the traces of {owner}. Choose another trace_dir or "
            "another trainer.name."
        )
    make_folder(wanted)
    atomic_write(wanted / OWNER, f"{run_dir}\n".encode())
    atomic_write(run_dir / POINTER, f"{wanted}\n".encode())
    return wanted


def named_by(run_dir: Path) -> Path | None:
    """The folder that the run names for its traces, whether or not that folder agrees."""
    named = read_line(run_dir, POINTER)
    return None if named is None else Path(named)


def traces_of(run_dir: Path) -> Path:
    """The folder with the traces of a run: the one that it names if that one names the run, else its own."""
    named = named_by(run_dir)
    agrees = named is not None and read_line(named, OWNER) == str(run_dir.resolve())
    return named if named is not None and agrees else run_dir


def run_of_traces(path: Path) -> Path:
    """The run that a folder of traces belongs to: RUN/influence_trace, RUN/influence_trace/steps, TRACE_DIR/NAME."""
    path = path.parent if path.name == "steps" else path
    # A run itself may be called tracin.
    is_run = any((path / name).exists() for name in ("metrics.jsonl", "config.yaml"))
    path = path.parent if path.name in KINDS and not is_run else path
    owner = read_line(path, OWNER)
    run = Path(owner) if owner is not None else path
    return run if run != path and named_by(run) == path.resolve() else path


def read_line(folder: Path, name: str) -> str | None:
    """The one line of a small file; None where there is none that can be read."""
    if not os.path.lexists(folder / name):  # of most runs, and asked for at every file that is read
        return None
    try:
        return os.fsdecode(read_confined(folder.resolve(), name, limit=LONGEST)).strip() or None
    except (RefusedError, OSError, ValueError):
        return None


LOG = "run.log"


class RunLog(logging.Handler):
    """Takes warnings of this package's loggers and of Python, and what is told to it."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(logging.WARNING)
        self.path = run_dir / LOG
        self._is_closed = False
        self._show: Any = warnings.showwarning
        logging.getLogger("gradtrace").addHandler(self)
        warnings.showwarning = self._warned  # type: ignore[assignment]

    def emit(self, record: logging.LogRecord) -> None:
        self.tell(f"{record.levelname.lower()}: {record.getMessage()}")

    def tell(self, text: str) -> None:
        """A line with the time; a disk that is full costs the line and nothing else."""
        lines = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n"
        with contextlib.suppress(OSError), self.path.open("a", encoding="utf-8", errors="replace") as file:
            file.write(lines)

    def telling(self, report: Callable[[str], None]) -> Callable[[str], None]:
        """`report`, with every message in the log as well."""

        def both(text: str) -> None:
            self.tell(text)
            report(text)

        return both

    def close(self) -> None:
        self._is_closed = True
        logging.getLogger("gradtrace").removeHandler(self)
        if warnings.showwarning == self._warned:  # else another has come after us, and calls us
            warnings.showwarning = self._show
        super().close()

    def _warned(self, message: Any, category: Any, filename: str, lineno: int, *more: Any) -> None:
        if not self._is_closed:
            self.tell(f"{category.__name__}: {message} ({filename}:{lineno})")
        self._show(message, category, filename, lineno, *more)


_open: weakref.WeakSet[RunFiles] = weakref.WeakSet()


class RunFiles:
    """Writes the files of a run that are not traces; `open_run` reads them. One process at a time: a second is told
    who writes.

    `with RunFiles("runs/mine") as files:` leaves a summary at the end; without `with` the end of the process does.
    """

    def __init__(self, run_dir: str | os.PathLike[str], fsync: bool = False, role: str = LOCK) -> None:
        self.path = Path(run_dir)
        self.fsync = fsync
        self.role = role
        self.traces = self.path
        """Where traces go; `place_traces` may say elsewhere."""
        make_folder(self.path, fsync)
        acquire_lock(self.path, role)
        remove_leftovers(self.path)
        self._metrics = JsonLines(self.path / "metrics.jsonl", fsync)
        self.messages = RunLog(self.path)
        self.messages.tell(f"begins: process {os.getpid()}, {' '.join(sys.argv)[:500]}")
        self._last_step: int | None = None
        """Logged since the last summary."""
        self._pid = os.getpid()
        _open.add(self)

    def place_traces(self, trace_dir: str) -> None:
        """Put the traces in TRACE_DIR/NAME instead of the run; empty: not."""
        self.traces = place_traces(self.path, trace_dir)

    def __enter__(self) -> RunFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(finished=kind is None)

    def close(self, finished: bool = True) -> None:
        """The run is over, or this part of it. What logged steps and wrote no summary after them gets one."""
        if self not in _open or os.getpid() != self._pid:
            return
        _open.discard(self)
        if self._last_step is not None and self.path.is_dir():
            self.write_summary({"steps": self._last_step, "finished": finished})
        self.messages.close()
        release_lock(self.path, self.role)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl. Numbers of NumPy and torch are fine."""
        self._metrics.append({"step": step, **metrics})
        self._last_step = step

    def write_config(self, yaml: str) -> None:
        atomic_write(self.path / "config.yaml", yaml.encode(), self.fsync)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        atomic_write(self.path / "summary.json", seal(dict(summary), indent=2), self.fsync)
        self._last_step = None

    def write_token_bytes(self, token_bytes: TokenBytes) -> None:
        atomic_write(self.path / "token_bytes.npz", token_bytes.dump(), self.fsync)

    def truncate_after(self, step: int) -> None:
        """Drop the metrics of every step after `step`: a resumed run writes them again."""
        self._metrics.keep(lambda record: record.get("step", 0) <= step)


@contextlib.contextmanager
def nothing_left_on_error(run_dir: Path, is_new: bool) -> Iterator[None]:
    """A start that fails leaves no folder: the next one would have to take another name."""
    try:
        yield
    except BaseException:
        if is_new and run_dir.is_dir():
            for files in [files for files in _open if files.path == run_dir]:
                files.close(finished=False)
            for folder in {traces_of(run_dir), run_dir}:
                shutil.rmtree(folder, ignore_errors=True)
        raise


def _close_all() -> None:
    """For loops that say nothing at their end: the end of the process, in order or by an exception, is theirs."""
    for files in list(_open):
        with contextlib.suppress(OSError):
            files.close(finished=not hasattr(sys, "last_value"))


atexit.register(_close_all)
