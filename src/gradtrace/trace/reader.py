"""`open_run`: read a run, finished or still being written, and believe nothing that is not checked.

    run = gradtrace.open_run("runs/demo")
    step = run.step("influence_trace", run.steps("influence_trace")[-1])
    step["entropy"]                 # a whole column
    for r in step.group(0).responses:
        print(step.response(r).reward, step.influence(r))

A step whose file is damaged, missing or refused is left out; `run.problems` names it and says why.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gradtrace.errors import GradtraceError
from gradtrace.trace.columns import KINDS, SchemaError, record_of
from gradtrace.trace.files import DamagedError, RefusedError, read_confined, size_confined, unseal
from gradtrace.trace.run_files import OWNER, POINTER, named_by, run_of_traces, traces_of
from gradtrace.trace.safe_npz import SafeNpz, UnsafeNpzError
from gradtrace.trace.step import Step
from gradtrace.trace.table import StepTable
from gradtrace.trace.token_text import TokenBytes
from gradtrace.trace.writer import Manifest, ManifestLine

logger = logging.getLogger(__name__)

MAX_STEP_BYTES = 4 << 30
FINDINGS = "findings.jsonl"
MAX_TEXT_BYTES = 64 << 20


class StepUnreadableError(GradtraceError):
    """This one step cannot be read; the others can."""


@dataclass(frozen=True)
class Damage:
    where: str
    """Path inside the run."""
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def read_run(path: str | os.PathLike[str]) -> RunReader:
    """The run in folder `path`. Cheap: files are read when asked for, and again when they have grown."""
    root = run_of_traces(Path(path))
    if not root.is_dir():
        raise GradtraceError(f"no run at {root}: it is not a folder. `ls {root.parent}` shows what is there")
    return RunReader(root.resolve())


class _PlainLoader(yaml.SafeLoader):
    """A YAML loader without aliases: ten lines of them grow to gigabytes as soon as they are written out as JSON."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are refused")
        return super().compose_node(parent, index)


def _load_config(data: bytes) -> dict[str, Any]:
    """Plain dictionaries, lists, strings and numbers; empty for an empty file."""
    try:
        loaded = yaml.load(data, Loader=_PlainLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DamagedError(f"not YAML that we read ({error})") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise DamagedError("not a YAML mapping")
    return loaded


def dig(config: Mapping[str, Any], path: str) -> Any:
    """The setting `a.b.c` of a configuration; None where it has none."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _range(steps: list[int]) -> str:
    return "no steps" if not steps else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"


class RunReader:
    """A run on disk: `run.kinds()`, `run.steps(kind)`, `run.step(kind, number)`, `run.metrics()`, `run.findings()`,
    `run.config`, `run.summary`, and `run.problems`, what was found damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._problems: dict[str, Damage] = {}
        self._token_bytes: tuple[bytes, TokenBytes] | None = None
        self._manifests: dict[str, Manifest] = {}

    def __repr__(self) -> str:
        """Where it is, and the steps of every kind that it has."""
        kinds = {kind: self.steps(kind) for kind in self.kinds()}
        traces = [f"{kind}: {_range(steps)}" for kind, steps in kinds.items()] or ["no traces"]
        problems = f"; {len(self.problems)} problems" if self.problems else ""
        return f"Run({str(self.path)!r}; {'; '.join(traces)}{problems})"

    def place_of(self, name: str) -> Path:
        """The folder that file `name` of the run lies under: traces may be elsewhere (`trainer.trace_dir`)."""
        if name.split("/")[0] not in KINDS:
            return self.path
        if (named := named_by(self.path)) is None:
            return self.path
        found = traces_of(self.path)
        if found == self.path:
            self._note(
                POINTER,
                f"its traces are in {named}, which is not there or does not name this run in {OWNER}: write "
                f"{self.path} there if the run was moved",
            )
        return found

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def problems(self) -> list[Damage]:
        """What was found damaged or refused so far, one entry per file."""
        return list(self._problems.values())

    @property
    def config(self) -> dict[str, Any]:
        """config.yaml as plain dictionaries; empty if there is none."""
        data = self._read_small("config.yaml")
        try:
            return _load_config(data or b"")
        except DamagedError as error:
            self._note("config.yaml", str(error))
            return {}

    @property
    def summary(self) -> dict[str, Any]:
        return self._read_json("summary.json")

    @property
    def token_bytes(self) -> TokenBytes | None:
        """Texts of token ids (`token_bytes.npz`); None if the run has none."""
        name = "token_bytes.npz"
        data = self._read_small(name)
        if data is None:
            return None
        digest = hashlib.sha256(data).digest()
        if self._token_bytes is None or self._token_bytes[0] != digest:
            try:
                self._token_bytes = (digest, TokenBytes.parse(data))
            except UnsafeNpzError as error:
                self._note(name, str(error))
                return None
        return self._token_bytes[1]

    def metrics(self, start: int = 0) -> tuple[list[dict[str, Any]], int]:
        """(records after byte `start` of metrics.jsonl, where to start next time). A last line that is being
        written comes with the next call; a file that was cut (a resumed run) is read anew: key what you keep
        by step."""
        name = "metrics.jsonl"
        try:
            size = size_confined(self.path, name)
            if size is None:
                return [], 0
            start = start if 0 <= start <= size else 0
            data = read_confined(self.path, name, start=max(0, start - 1))
            if start and not data.startswith(b"\n"):  # rewritten and grown past `start` since the last call
                start, data = 0, read_confined(self.path, name)
            elif start:
                data = data[1:]
        except (RefusedError, OSError) as error:
            self._note(name, str(error))
            return [], start
        whole = data.rfind(b"\n") + 1
        return self._records(name, data[:whole]), start + whole

    def metrics_by_step(self) -> dict[int, dict[str, Any]]:
        """All of metrics.jsonl, in the order of steps; where a resumed run wrote a step twice, its later values."""
        rows: dict[int, dict[str, Any]] = {}
        for record in self.metrics()[0]:
            if isinstance(record.get("step"), int):
                rows[record["step"]] = {**rows.get(record["step"], {}), **record}
        return dict(sorted(rows.items()))

    def findings(self) -> list[dict[str, Any]]:
        """What the detectors said while the run went on, in order: findings.jsonl."""
        return self._records(FINDINGS, self._read_small(FINDINGS) or b"")

    def _records(self, name: str, lines: bytes) -> list[dict[str, Any]]:
        found = []
        for line in lines.splitlines():
            try:
                found.append(unseal(line, strict=False))
            except DamagedError as error:
                self._note(name, f"a line was left out: {error}")
        return found

    def kinds(self) -> list[str]:
        """The kinds of trace this run has."""
        marks = ("manifest.jsonl", "summary.json")
        return [kind for kind in KINDS if any((self.place_of(kind) / kind / mark).exists() for mark in marks)]

    def entries(self, kind: str) -> dict[int, ManifestLine]:
        """Manifest entries by step, in order: bytes, counts and time of every step."""
        record_of(kind)
        name = f"{kind}/manifest.jsonl"
        counted = self._counted_steps(kind)  # before the manifest, which a live writer updates first
        known = self._manifests.setdefault(kind, Manifest())
        known.update(self._read_small(name) or b"")
        found = len(known.entries) + len(known.problems)
        if known.problems:
            self._note(name, "; ".join(known.problems[:5]))
        elif found < counted and found < self._counted_steps(kind):
            self._note(name, f"lists {found} steps, summary.json counts {counted}: lines were lost")
        else:
            self._problems.pop(name, None)
        return dict(sorted(known.entries.items()))

    def steps(self, kind: str) -> list[int]:
        return list(self.entries(kind))

    def step(self, kind: str, step: int) -> Step:
        """One step, verified against the manifest; `StepUnreadableError` says what is wrong with it."""
        for attempt in (1, 2):  # a writer may replace a step between our look at the manifest and at the file
            entry = self.entries(kind).get(step)
            if entry is None:
                steps = self.steps(kind)
                has = f"{len(steps)}, from {steps[0]} to {steps[-1]}" if steps else "none"
                raise StepUnreadableError(f"{kind} has no step {step} in {self.path}: it has {has}")
            try:
                return self._load(kind, entry)
            except (UnsafeNpzError, RefusedError, SchemaError, DamagedError, OSError) as error:
                if attempt == 1 and self.entries(kind).get(step) != entry:
                    continue
                name = f"{kind}/{entry.file}"
                self._note(name, str(error), key=f"{kind} {step}")
                raise StepUnreadableError(f"step {step} of {kind} was left out: {name}: {error}") from error
        raise AssertionError("unreachable")

    def readable_steps(self, kind: str, steps: list[int] | None = None) -> Iterator[Step]:
        """Every step (of `steps`) that can be read, one at a time; the others are in `problems`."""
        for number in self.steps(kind) if steps is None else steps:
            try:
                yield self.step(kind, number)
            except StepUnreadableError:
                continue

    def parts(self, step: int) -> tuple[dict[str, Step], list[str]]:
        """The files of one step by instrument, and why others cannot be read."""
        parts: dict[str, Step] = {}
        problems = []
        for kind in KINDS:
            if step in self.entries(kind):
                try:
                    parts[kind] = self.step(kind, step)
                except StepUnreadableError as error:
                    problems.append(str(error))
        return parts, problems

    def step_table(self, step: int, kind: str = "") -> StepTable:
        """The files of one step joined; `kind`: that one's file alone. `StepUnreadableError` where none can be read."""
        if kind:
            return StepTable(step, {kind: self.step(kind, step)})
        parts, problems = self.parts(step)
        if not parts:
            raise StepUnreadableError("; ".join(problems) or f"{self.path} has no files of step {step}")
        return StepTable(step, parts, problems)

    def verify(self) -> list[Damage]:
        """Read everything once and return what is wrong with it."""
        for kind in self.kinds():
            for _ in self.readable_steps(kind):
                pass
        self.metrics()
        _ = self.config, self.summary, self.token_bytes
        return self.problems

    def _counted_steps(self, kind: str) -> int:
        counted = self._read_json(f"{kind}/summary.json").get("steps", 0)
        return counted if isinstance(counted, int) else 0

    def _load(self, kind: str, entry: ManifestLine) -> Step:
        if entry.bytes > MAX_STEP_BYTES:
            raise UnsafeNpzError(f"declares {entry.bytes} bytes, more than {MAX_STEP_BYTES}")
        data = read_confined(self.place_of(kind), f"{kind}/{entry.file}", limit=entry.bytes + 1)
        if len(data) != entry.bytes:
            at_least = "more than " if len(data) > entry.bytes else ""
            raise DamagedError(f"has {at_least}{min(len(data), entry.bytes)} bytes, the manifest says {entry.bytes}")
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise DamagedError("its sha256 is not the one in the manifest")
        step = Step(kind, entry.step, SafeNpz(data))
        self._problems.pop(f"{kind} {entry.step}", None)  # it was damaged, and then written again
        return step

    def _read_small(self, name: str) -> bytes | None:
        """The file's bytes; None if it is not there, or refused (then it is a problem)."""
        try:
            root = self.place_of(name)
            if size_confined(root, name) is None:
                return None
            data = read_confined(root, name, limit=MAX_TEXT_BYTES + 1)
            if len(data) > MAX_TEXT_BYTES:
                raise RefusedError(f"is larger than {MAX_TEXT_BYTES} bytes: refused")
            return data
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

    def _note(self, where: str, what: str, key: str | None = None) -> None:
        problem = Damage(where, what)
        if self._problems.get(key or where) != problem:
            logger.warning("%s: %s", self.path, problem)
        self._problems[key or where] = problem
