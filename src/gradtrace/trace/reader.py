"""`open_run`: read a run, finished or still being written, and believe nothing that is not checked.

    run = gradtrace.open_run("runs/demo")
    step = run.step("influence_trace", run.steps("influence_trace")[-1])
    step["entropy"]                 # a whole column
    for r in step.group(0).responses:
        print(step.response(r).reward, step.tokens(r)["influence_position"])

A step whose file is damaged, missing or refused is left out; `run.problems` names it and says why.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradtrace.errors import GradtraceError
from gradtrace.trace import manifest, schema
from gradtrace.trace.atomic import DamagedError, unseal
from gradtrace.trace.confined import RefusedError, read_confined, size_confined
from gradtrace.trace.safe_npz import SafeNpz, UnsafeNpzError
from gradtrace.trace.step import Step

MAX_STEP_BYTES = 4 << 30
MAX_TEXT_BYTES = 64 << 20


class StepUnreadableError(GradtraceError):
    """This one step cannot be read; the others can."""


@dataclass(frozen=True)
class Problem:
    where: str
    """Path inside the run."""
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def open_run(path: str | os.PathLike[str]) -> Run:
    """The run in folder `path`. Cheap: files are read when asked for, and again when they have grown."""
    root = Path(path)
    if not root.is_dir():
        raise GradtraceError(f"no run at {root}: it is not a folder. `ls {root.parent}` shows what is there")
    return Run(root.resolve())


class Run:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._problems: dict[str, Problem] = {}

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def problems(self) -> list[Problem]:
        """What was found damaged or refused so far, one entry per file."""
        return list(self._problems.values())

    @property
    def config(self) -> dict[str, Any]:
        """config.yaml as plain dictionaries; empty if there is none."""
        import yaml

        data = self._read_small("config.yaml")
        try:
            loaded = yaml.safe_load(data) if data else {}
        except (yaml.YAMLError, RecursionError) as error:
            self._note("config.yaml", f"not YAML ({error})")
            return {}
        return loaded if isinstance(loaded, dict) else {}

    @property
    def summary(self) -> dict[str, Any]:
        return self._read_json("summary.json")

    def metrics(self, start: int = 0) -> tuple[list[dict[str, Any]], int]:
        """(records after byte `start` of metrics.jsonl, where to start next time). A last line that is being
        written comes with the next call; a file that has become shorter (a resumed run) is read anew."""
        name = "metrics.jsonl"
        try:
            size = size_confined(self.path, name)
            if size is None:
                return [], 0
            start = start if 0 <= start <= size else 0
            data = read_confined(self.path, name, start=start)
        except (RefusedError, OSError) as error:
            self._note(name, str(error))
            return [], start
        whole = data.rfind(b"\n") + 1
        records = []
        for line in data[:whole].splitlines():
            try:
                records.append(unseal(line, strict=False))
            except DamagedError as error:
                self._note(name, f"a line was left out: {error}")
        return records, start + whole

    def kinds(self) -> list[str]:
        """The kinds of trace this run has."""
        return [kind for kind in schema.KINDS if (self.path / kind / "manifest.jsonl").exists()]

    def entries(self, kind: str) -> dict[int, manifest.Entry]:
        """Manifest entries by step: bytes, counts and time of every step."""
        self._check_kind(kind)
        name = f"{kind}/manifest.jsonl"
        entries, bad_lines = manifest.parse(self._read_small(name) or b"")
        if bad_lines:
            self._note(name, "; ".join(bad_lines[:5]))
        return entries

    def steps(self, kind: str) -> list[int]:
        return list(self.entries(kind))

    def step(self, kind: str, step: int) -> Step:
        """One step, verified against the manifest; `StepUnreadableError` says what is wrong with it."""
        for attempt in (1, 2):  # a writer may replace a step between our look at the manifest and at the file
            entry = self.entries(kind).get(step)
            if entry is None:
                raise StepUnreadableError(f"{kind} has no step {step} in {self.path}")
            try:
                return self._load(kind, entry)
            except (UnsafeNpzError, RefusedError, schema.SchemaError, DamagedError, OSError) as error:
                if attempt == 1 and self.entries(kind).get(step) != entry:
                    continue
                name = f"{kind}/{entry.file}"
                self._note(name, str(error))
                raise StepUnreadableError(f"step {step} of {kind} was left out: {name}: {error}") from error
        raise AssertionError("unreachable")

    def readable_steps(self, kind: str) -> list[Step]:
        """Every step that can be read; the others are in `problems`."""
        loaded = []
        for number in self.steps(kind):
            try:
                loaded.append(self.step(kind, number))
            except StepUnreadableError:
                continue
        return loaded

    def _load(self, kind: str, entry: manifest.Entry) -> Step:
        if entry.bytes > MAX_STEP_BYTES:
            raise UnsafeNpzError(f"declares {entry.bytes} bytes, more than {MAX_STEP_BYTES}")
        data = read_confined(self.path, f"{kind}/{entry.file}", limit=entry.bytes + 1)
        if len(data) != entry.bytes:
            at_least = "more than " if len(data) > entry.bytes else ""
            raise DamagedError(
                f"has {at_least}{min(len(data), entry.bytes)} bytes, the manifest says {entry.bytes}"
            )
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise DamagedError("its sha256 is not the one in the manifest")
        return Step(kind, entry.step, SafeNpz(data))

    def _check_kind(self, kind: str) -> None:
        if kind not in schema.KINDS:
            raise GradtraceError(f"no trace kind {kind!r}; there are {', '.join(schema.KINDS)}")

    def _read_small(self, name: str) -> bytes | None:
        """The file's bytes; None if it is not there, or refused (then it is a problem)."""
        try:
            if size_confined(self.path, name) is None:
                return None
            return read_confined(self.path, name, limit=MAX_TEXT_BYTES)
        except (RefusedError, OSError) as error:
            self._note(name, str(error))
            return None

    def _read_json(self, name: str) -> dict[str, Any]:
        data = self._read_small(name)
        if data is None:
            return {}
        try:
            return unseal(data, strict=False)
        except DamagedError as error:
            self._note(name, str(error))
            return {}

    def _note(self, where: str, what: str) -> None:
        self._problems[where] = Problem(where, what)
