"""`TraceWriter`: step files on disk, off the training thread.

    with TraceWriter("runs/mine", "entropy_trace") as writer:
        writer.write(step, {"token_id": ids, "entropy": entropies, …}, meta={"task": "mine"})

`write` checks and copies the columns and returns; one background thread does the rest. Memory is bounded:
with `queue_size` steps waiting, `write` blocks, and says so. It needs nothing of our trainer.

A trace's manifest has a sealed line per step, appended after the step's file is whole. It is the authority: a step file
without a line is not part of the run, and a later line for a step replaces an earlier one. So that a rewritten step is
old or new and never a mixture, the new file gets a new name (`step_000007.r1.npz`), the line switches over, and then
the old file goes.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gradtrace.errors import GradtraceError
from gradtrace.trace.columns import FORMAT_VERSION, SchemaError, conform, record_of
from gradtrace.trace.files import (
    DamagedError,
    JsonLines,
    atomic_write,
    make_folder,
    plain_number,
    remove_leftovers,
    seal,
    unseal,
)
from gradtrace.trace.safe_npz import dump_npz

_FILE = re.compile(r"steps/step_(\d{6,})(?:\.r(\d+))?\.npz")


@dataclass(frozen=True)
class ManifestLine:
    step: int
    file: str
    """Path inside the kind's folder."""
    bytes: int
    sha256: str
    groups: int
    responses: int
    tokens: int
    time: float
    """Seconds since 1970, when the file was written."""


def next_file(step: int, old: ManifestLine | None) -> str:
    """The name of a step's file that replaces the `old` one."""
    match = _FILE.fullmatch(old.file) if old else None
    return f"steps/step_{step:06d}.r{int(match[2] or 0) + 1}.npz" if match else f"steps/step_{step:06d}.npz"


def parse_line(line: bytes) -> ManifestLine:
    """The entry in a line, or a `DamagedError` that says what is wrong with it."""
    record = unseal(line)
    try:
        entry = ManifestLine(**record)
    except TypeError as error:
        raise DamagedError(f"not a manifest entry ({error})") from None
    numbers = (entry.step, entry.bytes, entry.groups, entry.responses, entry.tokens)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise DamagedError("a count is not a whole number")
    if not isinstance(entry.time, int | float) or not isinstance(entry.sha256, str):
        raise DamagedError("time or sha256 has the wrong type")
    match = _FILE.fullmatch(entry.file) if isinstance(entry.file, str) else None
    if match is None or int(match[1]) != entry.step:
        raise DamagedError(f"{entry.file!r} is not the name of a step file of this folder")
    return entry


class Manifest:
    """`entries` by step, in the order of their lines, and the `problems` of other lines. `update` parses only
    what is new."""

    def __init__(self, data: bytes = b"") -> None:
        self._parsed = b""
        self.entries: dict[int, ManifestLine] = {}
        self.problems: list[str] = []
        self.update(data)

    def update(self, data: bytes) -> None:
        """`data`: the whole file as it is now. A last line without newline does not count: it is being written,
        or its writer was killed."""
        whole = data[: data.rfind(b"\n") + 1]
        if not self._parsed or not whole.startswith(self._parsed):
            self._parsed, self.entries, self.problems = b"", {}, []
        number = self._parsed.count(b"\n")
        for line in whole[len(self._parsed) :].split(b"\n")[:-1]:
            number += 1
            try:
                entry = parse_line(line)
            except DamagedError as error:
                self.problems.append(f"line {number}: {error}")
            else:
                self.entries[entry.step] = entry
        self._parsed = whole


logger = logging.getLogger(__name__)


@dataclass
class WriterStats:
    written: int = 0
    """Number of steps that are on disk."""
    failed: int = 0
    """Steps or side files that could not be written; each was reported."""
    bytes: int = 0
    """Bytes of step files written."""
    blocked_writes: int = 0
    """Calls of `write` that found the queue full."""
    blocked_seconds: float = 0.0
    """Time those calls waited for the disk."""
    last_error: str = ""


@dataclass(frozen=True)
class _Job:
    step: int
    columns: dict[str, np.ndarray]
    meta_json: bytes


class TraceWriter:
    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        kind: str,
        *,
        fsync: bool = False,
        queue_size: int = 4,
        on_error: Literal["warn", "raise"] = "warn",
        on_report: Callable[[str], None] | None = None,
    ) -> None:
        """`on_error="warn"`: what goes wrong is logged, counted in `stats`, given to `on_report`, not raised.
        `"raise"`: bad columns raise at once, a failed write raises at the next `write` or `close`."""
        record_of(kind)
        if on_error not in ("warn", "raise"):
            raise GradtraceError(f"on_error is {on_error!r}; it is 'warn' or 'raise'")
        self.kind = kind
        self.on_error = on_error
        self.stats = WriterStats()
        self._on_report = on_report
        try:
            self._store = _StepStore(Path(run_dir) / kind, kind, fsync)
        except OSError as error:
            raise GradtraceError(f"cannot write a trace in {Path(run_dir) / kind}: {error}") from error
        self._queue: queue.Queue[_Job | None] = queue.Queue(maxsize=max(1, queue_size))
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=f"gradtrace-{kind}", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a script that forgets close() still gets its last steps

    def write(self, step: int, columns: Mapping[str, Any], meta: Mapping[str, Any] | None = None) -> None:
        """Queue one step. The same step again replaces it."""
        if self._closed:
            raise GradtraceError(f"the {self.kind} writer is closed")
        self._raise_pending()
        try:
            about = json.dumps({**(meta or {}), "step": int(step)}, default=plain_number).encode()
            job = _Job(int(step), conform(self.kind, columns), about)
        except (SchemaError, TypeError, ValueError) as error:
            self._fail(f"{self.kind} step {step} was not written: {error}", error)
            self._raise_pending()
            return
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            self._wait_for_room(job)

    def flush(self) -> None:
        """Wait until everything queued is on disk (or has failed)."""
        self._queue.join()
        self._raise_pending()

    def truncate_after(self, step: int) -> None:
        """Drop every step after `step`: a resumed run writes them again."""
        self.flush()
        self._store.truncate_after(step)

    def close(self) -> None:
        """Write what is queued and stop. Safe to call twice."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self.close)
            self._queue.put(None)
            self._thread.join()
        self._raise_pending()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _wait_for_room(self, job: _Job) -> None:
        start = time.monotonic()
        self._queue.put(job)
        waited = time.monotonic() - start
        self.stats.blocked_writes += 1
        self.stats.blocked_seconds += waited
        self._report(
            f"{self.kind}: the disk is slower than training: step {job.step} waited {waited:.2f} s "
            f"({self.stats.blocked_seconds:.1f} s in all); raise write_every or use a faster disk"
        )

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                self.stats.bytes += self._store.put(job.step, job.columns, job.meta_json)
                self.stats.written += 1
                self._store.tidy()
            except Exception as error:  # a trace must not kill training; it is counted and shown
                self._fail(f"{self.kind} step {job.step} was not written whole: {error}", error)
            finally:
                self._queue.task_done()
        self._queue.task_done()

    def _fail(self, message: str, error: BaseException) -> None:
        self.stats.failed += 1
        self.stats.last_error = message
        if self.on_error == "raise":
            self._error = self._error or error
        self._report(message)

    def _report(self, message: str) -> None:
        logger.warning(message)
        if self._on_report is None:
            return
        try:
            self._on_report(message)
        except Exception:  # it must not end the writing thread: `write` would then wait for ever
            logger.exception("on_report failed")

    def _raise_pending(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise GradtraceError(self.stats.last_error) from error


class _StepStore:
    """The folder of one kind: what the background thread does to it. Order is what makes it crash-safe:
    step file, manifest line, removal of what the line replaced, side files."""

    def __init__(self, folder: Path, kind: str, fsync: bool) -> None:
        self.folder = folder
        self.kind = kind
        self.fsync = fsync
        make_folder(folder / "steps", fsync)
        remove_leftovers(folder)
        remove_leftovers(folder / "steps")
        self.lines = JsonLines(folder / "manifest.jsonl", fsync)
        self.entries = Manifest(self.lines.path.read_bytes()).entries
        self.obsolete: list[str] = []

    def put(self, step: int, columns: dict[str, np.ndarray], meta_json: bytes) -> int:
        head: dict[str, np.ndarray] = {
            "format_version": np.array([FORMAT_VERSION], np.int32),
            "meta_json": np.frombuffer(meta_json, np.uint8),
        }
        data = dump_npz({**head, **columns})
        old = self.entries.get(step)
        entry = ManifestLine(
            step=step,
            file=next_file(step, old),
            bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            groups=len(columns["group_id"]),
            responses=len(columns["group"]),
            tokens=len(columns["token_id"]),
            time=round(time.time(), 3),
        )
        path = self.folder / entry.file
        atomic_write(path, data, self.fsync)
        try:
            self.lines.append(asdict(entry))
        except BaseException:
            if not self.lines.torn:  # no line points at it, and a full disk needs the space
                with contextlib.suppress(OSError):
                    os.unlink(path)
            raise
        self.entries[step] = entry
        self.obsolete = [file for file in self.obsolete if file != entry.file]  # a removal that failed before
        if old:
            self.obsolete.append(old.file)
        return len(data)

    def tidy(self) -> None:
        """Remove what later lines replaced, and bring the side files up to date."""
        while self.obsolete:
            (self.folder / self.obsolete[-1]).unlink(missing_ok=True)
            self.obsolete.pop()
        self._put_side_files(self.entries)

    def _put_side_files(self, by_step: dict[int, ManifestLine]) -> None:
        """Write summary.json and latest_step.txt for people and scripts; the reader goes by the manifest."""
        entries = by_step.values()
        summary = {
            "kind": self.kind,
            "format_version": FORMAT_VERSION,
            "steps": len(by_step),
            "first_step": min(by_step, default=None),
            "latest_step": max(by_step, default=None),
            "groups": sum(entry.groups for entry in entries),
            "responses": sum(entry.responses for entry in entries),
            "tokens": sum(entry.tokens for entry in entries),
            "bytes": sum(entry.bytes for entry in entries),
        }
        latest = f"{max(by_step)}\n" if by_step else ""
        atomic_write(self.folder / "latest_step.txt", latest.encode(), self.fsync)
        atomic_write(self.folder / "summary.json", seal(summary, indent=2), self.fsync)

    def truncate_after(self, step: int) -> None:
        before = self.entries
        # side files first: a summary that counts more steps than the manifest has means lost lines to the reader
        self._put_side_files({key: entry for key, entry in before.items() if key <= step})
        try:
            self.lines.keep(lambda record: record["step"] <= step)
        finally:  # it may fail before the rename or after
            self.entries = Manifest(self.lines.path.read_bytes()).entries
            self.obsolete += [entry.file for key, entry in before.items() if key not in self.entries]
        self.tidy()
