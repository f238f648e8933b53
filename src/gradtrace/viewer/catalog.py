"""The runs that a viewer serves, by integer id, and the steps it has in memory.

Ids are handed out in the order of discovery and stay for the life of the server. Nothing a browser sends is ever
part of a path: it names a run, a step, a group, a response by number, and the trace reader goes by its manifest.

A page asks every two seconds for news: is the run still going, and what has been written since last time. It says how
far it got (a byte offset into metrics.jsonl, the time of the newest manifest line of each trace) and gets only what
came after that.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import gradtrace.instruments  # noqa: F401  (makes every kind of trace known)
from gradtrace.attribution.config import InfluenceConfig
from gradtrace.errors import GradtraceError
from gradtrace.trace.columns import KINDS
from gradtrace.trace.reader import RunReader, dig, read_run
from gradtrace.trace.run_files import is_held, run_of_traces
from gradtrace.trace.step import Step
from gradtrace.trace.writer import ManifestLine
from gradtrace.viewer.scores import ScoredStep, load_step
from gradtrace.viewer.vocabulary import TOKEN_BYTES, Vocabulary, load_vocabulary

STEPS_IN_MEMORY = 12
"""Step tables and steps of single instruments."""
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


def stamp(path: Path) -> tuple[float, int, int]:
    """When a file was last written, its size and its inode; zeros if it is not there."""
    try:
        found = path.stat()
    except OSError:
        return 0.0, 0, 0
    return found.st_mtime, found.st_size, found.st_ino


def changed(path: Path) -> float:
    """When the file was last written; long ago if it is not there."""
    return stamp(path)[0]


class ServedRun:
    """A run with its number. What a page asks for every two seconds is read again only when its file has changed."""

    def __init__(self, run_id: int, run: RunReader) -> None:
        self.id = run_id
        self.run = run
        self._read: dict[str, tuple[tuple[float, int, int], Any]] = {}

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def vocabulary(self) -> Vocabulary:
        return self._fresh(TOKEN_BYTES, lambda: load_vocabulary(self.run))

    @property
    def config(self) -> dict[str, Any]:
        return self._fresh("config.yaml", lambda: self.run.config)

    def entries(self, kind: str) -> dict[int, ManifestLine]:
        """Manifest entries of a trace, by step."""
        return self._fresh(f"{kind}/manifest.jsonl", lambda: self.run.entries(kind))

    def _fresh(self, name: str, read: Callable[[], T]) -> T:
        now = stamp(self.run.place_of(name) / name)
        if name not in self._read or self._read[name][0] != now:
            self._read[name] = (now, read())
        return self._read[name][1]


class RunCatalog:
    def __init__(self, runs: list[Path], runs_dir: Path | None) -> None:
        """`runs`: given by the user, first one shown first; every run in `runs_dir` is listed besides."""
        self.runs_dir = runs_dir
        self.skipped: list[str] = []
        """Folders of `runs_dir` that were left out, and why."""
        self._lock = threading.Lock()
        self._served: list[ServedRun] = []
        self._paths: dict[Path, int] = {}
        self._steps: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        for path in runs:
            if not is_run(path):
                raise GradtraceError(f"no run at {path}: it has none of {', '.join(run_files())}")
            self._add(path.resolve())
        self.given = len(self._served)
        self.refresh()

    def _add(self, path: Path) -> None:
        if path not in self._paths:
            self._paths[path] = len(self._served)
            self._served.append(ServedRun(len(self._served), read_run(path)))

    def refresh(self) -> list[ServedRun]:
        """Look for new runs; all runs, the most recently written first."""
        with self._lock:
            if self.runs_dir is not None and self.runs_dir.is_dir():
                root, skipped = self.runs_dir.resolve(), []
                for folder in sorted(self.runs_dir.iterdir()):
                    resolved = folder.resolve()
                    if resolved in self._paths or folder.name.startswith("."):
                        continue
                    if is_run(folder) and resolved.is_relative_to(root):
                        self._add(resolved)
                    elif is_run(folder):
                        skipped.append(f"{folder} links to {resolved}, outside {self.runs_dir}; name it to see it")
                self.skipped = skipped
            return sorted(self._served, key=lambda served: -last_activity(served.run.path))

    def get(self, run_id: int) -> ServedRun | None:
        with self._lock:
            return self._served[run_id] if 0 <= run_id < len(self._served) else None

    def step_view(self, served: ServedRun, step: int) -> ScoredStep | None:
        """The step, from memory if its files are unchanged. Raises `StepUnreadableError`."""
        entries = [served.entries(kind).get(step) for kind in KINDS]
        files = tuple(entry.sha256 if entry else None for entry in entries)
        return self._remembered((served.id, step, files), lambda: load_step(served.run, step))

    def trace_step(self, served: ServedRun, kind: str, step: int) -> Step | None:
        """A step of one trace alone, from memory if its file is unchanged. Raises `StepUnreadableError`."""
        entry = served.entries(kind).get(step)
        if entry is None:
            return None
        return self._remembered((served.id, kind, entry.sha256), lambda: served.run.step(kind, step))

    def _remembered(self, key: tuple[Any, ...], load: Callable[[], T]) -> T:
        """What `load` gives, from memory where it was asked for lately."""
        with self._lock:
            if key in self._steps:
                self._steps.move_to_end(key)
                return self._steps[key]
        loaded = load()
        if loaded is None or getattr(loaded, "problems", None):  # a damaged file may be mended; look again
            return loaded
        with self._lock:
            self._steps[key] = loaded
            while len(self._steps) > STEPS_IN_MEMORY:
                self._steps.popitem(last=False)
        return loaded


def latest_run(runs_dir: Path) -> Path | None:
    """The run in `runs_dir` that was written to last."""
    if not runs_dir.is_dir():
        return None
    runs = [folder for folder in runs_dir.iterdir() if is_run(folder) and not folder.name.startswith(".")]
    return max(runs, key=last_activity, default=None)


def chosen_runs(names: list[str], runs_dir: Path) -> list[Path]:
    """The runs to show first: those named (a path, or a name in `runs_dir`), else the latest."""
    if not names:
        latest = latest_run(runs_dir)
        if latest is None:
            raise GradtraceError(
                f"no run in {runs_dir}/ yet. `gradtrace train` makes one; `gradtrace view --demo` shows one; "
                "--runs-dir looks elsewhere"
            )
        return [latest]
    paths = []
    for name in names:
        candidates = [run_of_traces(Path(name)), run_of_traces(runs_dir / name)]
        found = next((path for path in candidates if is_run(path)), None)
        if found is None:
            there = ", ".join(sorted(folder.name for folder in runs_dir.glob("*") if is_run(folder))[:20])
            where = f"no run at {candidates[0]} nor at {candidates[1]}"
            if candidates[0].is_dir():
                where = f"no run at {candidates[0]}: the folder has no config.yaml, no metrics.jsonl and no traces"
            raise GradtraceError(f"{where}; {runs_dir} has {there or 'none (`gradtrace train` makes one)'}")
        paths.append(found)
    return paths


def run_news(served: ServedRun, metrics_from: int, metrics_file: int, newest: Mapping[str, float]) -> dict[str, Any]:
    """`metrics_file`: the inode that `metrics_from` counts in (a resumed run has a new file). `newest`: by kind of
    trace, the time of the last manifest line that the page knows."""
    run = served.run
    _, _, inode = stamp(run.path / "metrics.jsonl")
    rows, offset = run.metrics(metrics_from if metrics_file == inode else 0)
    is_continued = metrics_file == inode and metrics_from <= offset
    total = dig(served.config, "trainer.total_steps")
    return {
        "state": state_of(run),
        "total_steps": total if isinstance(total, int) else None,
        "written": last_activity(run.path),
        "metrics": {"rows": rows, "continued": is_continued, "to": offset, "file": inode},
        "traces": {kind: _trace_news(served, kind, newest.get(kind, 0.0)) for kind in KINDS},
        "description": describe(served.config),
        "enabled": {kind: _enabled(served.config, kind) for kind in KINDS},
        "findings": len(run.findings()),
        "ablation": changed(run.path / ABLATION),
        "problems": [str(problem) for problem in run.problems],
        "vocabulary_problem": served.vocabulary.problem,
    }


def _trace_news(served: ServedRun, kind: str, after: float) -> dict[str, Any]:
    entries = served.entries(kind)
    return {
        "present": kind in served.run.kinds(),
        "steps": [
            {"step": entry.step, "groups": entry.groups, "responses": entry.responses, "tokens": entry.tokens}
            for entry in entries.values()
            if entry.time > after
        ],
        "count": len(entries),
        "newest": max((entry.time for entry in entries.values()), default=0.0),
    }


def state_of(run: RunReader) -> str:
    """finished, stopped (before its last step), live (a process holds its lock) or quiet (no end noted, and nobody
    writes). A summary older than the last metrics belongs to an earlier part of a run that was resumed."""
    if is_held(run.path):
        return "live"
    summary = run.summary
    if summary and changed(run.path / "summary.json") >= changed(run.path / "metrics.jsonl"):
        return "stopped" if summary.get("finished") is False else "finished"
    return "quiet"


def _enabled(config: Mapping[str, Any], kind: str) -> bool | None:
    """What the configuration says about the setting that turns the instrument on; None if it says nothing."""
    value = dig(config, KINDS[kind].switch.split("=")[0])
    return bool(value) if isinstance(value, bool | int) else None


def describe(config: Mapping[str, Any]) -> str:
    """One line about a run: model, algorithm, batch, learning rate, how influence is traced."""
    model = dig(config, "model.path") or dig(config, "task.name")
    advantage, loss = dig(config, "algorithm.advantage"), dig(config, "algorithm.policy_loss")
    prompts, n = dig(config, "data.train_batch_size"), dig(config, "rollout.n")
    rate = dig(config, "actor.optim.lr")
    parts = [
        str(model or ""),
        f"{str(advantage).upper()} with {loss} loss" if advantage and loss else "",
        f"{prompts} prompts × {n} responses" if prompts and n else "",
        (f"lr {rate:g}" if isinstance(rate, float) else f"lr {rate}") if rate else "",
        _describe_influence(config),
    ]
    return " · ".join(part for part in parts if part)


def _describe_influence(config: Mapping[str, Any]) -> str:
    influence = dig(config, "trainer.influence_trace")
    if not isinstance(influence, Mapping) or not influence.get("enable"):
        return ""
    defining = ("hessian_mode", "credit", "output_function", "target")
    if InfluenceConfig(**{name: influence[name] for name in defining if name in influence}).is_parts:
        return "influence: what each step does to every token, in nats"
    credit = str(influence.get("credit")).replace("_", "-")
    curvature = f"{influence.get('hessian_source', 'response')} curvature"
    geometries = {"inverse": curvature, "optimizer": "the optimizer's geometry"}
    whole = influence.get("scope_pass") or not dig(config, "actor.mini_batch_size")
    wide = f"all selected responses of the {'step' if whole else 'mini-batch'}"
    words = [
        "position and loss-term credit" if credit == "both" else f"{credit} credit",
        geometries.get(str(influence.get("hessian_mode")), ""),
        {"all_selected": wide}.get(str(influence.get("accepted_rejected_scope")), "own group"),
    ]
    return "influence from captured factors: " + ", ".join(word for word in words if word)
