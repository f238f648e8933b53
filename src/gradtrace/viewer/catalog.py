"""The runs that a viewer serves, by integer id, and the steps it has in memory.

Ids are handed out in the order of discovery and stay for the life of the server. Nothing a browser sends is ever
part of a path: it names a run, a step, a group, a response by number, and the trace reader goes by its manifest.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from gradtrace.errors import GradtraceError
from gradtrace.trace.manifest import Entry
from gradtrace.trace.reader import Run, open_run
from gradtrace.trace.schema import BLAME, ENTROPY_TRACE, INFLUENCE_TRACE, KINDS
from gradtrace.trace.step import Step
from gradtrace.viewer.step_view import StepView, load_step_view
from gradtrace.viewer.vocabulary import TOKEN_BYTES, Vocabulary, load_vocabulary

STEPS_IN_MEMORY = 6
ABLATION = "ablation.json"
T = TypeVar("T")


def run_files() -> tuple[str, ...]:
    """A folder with one of these can be looked at: a run, a probe, an ablation."""
    return ("config.yaml", "metrics.jsonl", ABLATION, *KINDS)


def is_run(folder: Path) -> bool:
    return folder.is_dir() and any((folder / name).exists() for name in run_files())


def last_activity(folder: Path) -> float:
    """Seconds since 1970 when the run last wrote something."""
    manifests = (f"{kind}/manifest.jsonl" for kind in KINDS)
    return max(
        changed(folder / name) for name in ("metrics.jsonl", "summary.json", "config.yaml", ABLATION, *manifests)
    )


def changed(path: Path) -> float:
    """When the file was last written; long ago if it is not there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


class ServedRun:
    """A run with its number. What a page asks for every two seconds is read again only when its file has changed."""

    def __init__(self, run_id: int, run: Run) -> None:
        self.id = run_id
        self.run = run
        self._read: dict[str, tuple[tuple[int, int, int], Any]] = {}

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def vocabulary(self) -> Vocabulary:
        return self._fresh(TOKEN_BYTES, lambda: load_vocabulary(self.run))

    @property
    def config(self) -> dict[str, Any]:
        return self._fresh("config.yaml", lambda: self.run.config)

    def entries(self, kind: str) -> dict[int, Entry]:
        """Manifest entries of a trace, by step."""
        return self._fresh(f"{kind}/manifest.jsonl", lambda: self.run.entries(kind))

    def _fresh(self, name: str, read: Callable[[], T]) -> T:
        try:
            found = (self.run.place_of(name) / name).stat()
            stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
        except OSError:
            stamp = (0, 0, 0)
        known = self._read.get(name)
        if known is None or known[0] != stamp:
            known = self._read[name] = (stamp, read())
        return known[1]


class RunCatalog:
    def __init__(self, runs: list[Path], runs_dir: Path | None) -> None:
        """`runs`: given by the user, first one shown first; every run in `runs_dir` is listed besides."""
        self.runs_dir = runs_dir
        self.skipped: list[str] = []
        """Folders of `runs_dir` that were left out, and why."""
        self._lock = threading.Lock()
        self._served: list[ServedRun] = []
        self._paths: dict[Path, int] = {}
        self._steps: OrderedDict[tuple[int, int, str], StepView] = OrderedDict()
        self._traces: OrderedDict[tuple[int, str, str], Step] = OrderedDict()
        for path in runs:
            if not is_run(path):
                raise GradtraceError(f"no run at {path}: it has none of {', '.join(run_files())}")
            self._add(path.resolve())
        self.given = len(self._served)
        self.refresh()

    def _add(self, path: Path) -> None:
        if path not in self._paths:
            self._paths[path] = len(self._served)
            self._served.append(ServedRun(len(self._served), open_run(path)))

    def refresh(self) -> list[ServedRun]:
        """Look for new runs; all runs, the most recently written first."""
        with self._lock:
            if self.runs_dir is not None and self.runs_dir.is_dir():
                root = self.runs_dir.resolve()
                skipped = []
                for folder in sorted(self.runs_dir.iterdir()):
                    resolved = folder.resolve()
                    if resolved in self._paths or folder.name.startswith("."):
                        continue
                    if not resolved.is_relative_to(root):
                        if is_run(folder):
                            skipped.append(f"{folder} links to {resolved}, outside {self.runs_dir}; name it to see it")
                    elif is_run(folder):
                        self._add(resolved)
                self.skipped = skipped
            return sorted(self._served, key=lambda served: -last_activity(served.run.path))

    def get(self, run_id: int) -> ServedRun | None:
        with self._lock:
            return self._served[run_id] if 0 <= run_id < len(self._served) else None

    def step_tag(self, served: ServedRun, step: int) -> str | None:
        """Changes when the step's files do; None if no trace has the step."""
        entries = [served.entries(kind).get(step) for kind in (ENTROPY_TRACE, INFLUENCE_TRACE, BLAME)]
        if entries[0] is None and entries[1] is None:
            return None
        return "-".join(entry.sha256[:16] if entry else "none" for entry in entries)

    def step_view(self, served: ServedRun, step: int) -> StepView | None:
        """The step, from memory if its files are unchanged. Raises `StepUnreadableError`."""
        tag = self.step_tag(served, step)
        if tag is None:
            return None
        return self._recent(self._steps, (served.id, step, tag), lambda: load_step_view(served.run, step))

    def trace_step(self, served: ServedRun, kind: str, step: int) -> Step | None:
        """A step of one trace alone, from memory if its file is unchanged. Raises `StepUnreadableError`."""
        entry = served.entries(kind).get(step)
        if entry is None:
            return None
        return self._recent(self._traces, (served.id, kind, entry.sha256), lambda: served.run.step(kind, step))

    def _recent(self, memory: OrderedDict[Any, Any], key: tuple[Any, ...], load: Callable[[], T]) -> T:
        """What `load` gives, from memory where it was asked for lately."""
        with self._lock:
            if key in memory:
                memory.move_to_end(key)
                return memory[key]
        loaded = load()
        if loaded is None or getattr(loaded, "problems", None):  # a damaged file may be mended; look again
            return loaded
        with self._lock:
            memory[key] = loaded
            while len(memory) > STEPS_IN_MEMORY:
                memory.popitem(last=False)
        return loaded


def latest_run(runs_dir: Path) -> Path | None:
    """The run in `runs_dir` that was written to last."""
    if not runs_dir.is_dir():
        return None
    runs = [folder for folder in runs_dir.iterdir() if is_run(folder) and not folder.name.startswith(".")]
    return max(runs, key=last_activity, default=None)
