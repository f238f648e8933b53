"""The files of a run that are not traces: config.yaml, metrics.jsonl, summary.json, token_bytes.npz, run.log, .lock."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gradtrace.trace import lock, places
from gradtrace.trace.atomic import JsonLines, atomic_write, make_folder, remove_leftovers, seal
from gradtrace.trace.run_log import RunLog
from gradtrace.trace.token_text import TokenBytes

_open: weakref.WeakSet[RunFiles] = weakref.WeakSet()


class RunFiles:
    """Writes the files of a run that are not traces; `open_run` reads them. One process at a time: a second is told
    who writes.

    `with RunFiles("runs/mine") as files:` leaves a summary at the end; without `with` the end of the process does.
    """

    def __init__(self, run_dir: str | os.PathLike[str], fsync: bool = False, role: str = lock.LOCK) -> None:
        self.path = Path(run_dir)
        self.fsync = fsync
        self.role = role
        self.traces = self.path
        """Where traces go; `place_traces` may say elsewhere."""
        make_folder(self.path, fsync)
        lock.acquire(self.path, role)
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
        self.traces = places.place_traces(self.path, trace_dir)

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
        lock.release(self.path, self.role)

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
            for folder in {places.traces_of(run_dir), run_dir}:
                shutil.rmtree(folder, ignore_errors=True)
        raise


def _close_all() -> None:
    """For loops that say nothing at their end: the end of the process, in order or by an exception, is theirs."""
    for files in list(_open):
        with contextlib.suppress(OSError):
            files.close(finished=not hasattr(sys, "last_value"))


atexit.register(_close_all)
