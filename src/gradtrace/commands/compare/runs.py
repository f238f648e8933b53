"""Runs as `compare` sees them: metrics by step, what a step costs on each axis, and the groups of seeds they form."""

from __future__ import annotations

import difflib
import fnmatch
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gradtrace.errors import GradtraceError
from gradtrace.instruments.influence import INFLUENCE_TRACE
from gradtrace.runs import flat, open_run
from gradtrace.trace.reader import RunReader, dig

AXES = {
    "steps": "training steps",
    "trained": "responses trained on",
    "generated": "responses generated, validation rollouts of TracIn included",
    "time": "seconds of training, evaluation left out",
}
COUNTS = {"trained": "perf/trained_responses", "generated": "perf/generated_responses"}


@dataclass
class RunCurves:
    name: str
    path: Path
    config: dict[str, Any]
    rows: dict[int, dict[str, Any]]
    """Metrics by step, ascending; where a resumed run wrote a step twice, the later line."""
    remarks: list[str] = field(default_factory=list)
    """What a reader of the comparison should know about this run."""
    influence_unit: str = ""
    """Of its influence scores: nats, or influence for those of captured factors; empty: it has none."""

    @property
    def metric_names(self) -> list[str]:
        return sorted({name for row in self.rows.values() for name, value in row.items() if _is_number(value)})

    def series(self, metric: str, against: str, smooth: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """(x, y) of the steps that logged the metric, float64; `smooth`: mean over that many logged values."""
        places = self.places(against)
        found = [(places[step], float(row[metric])) for step, row in self.rows.items() if _is_number(row.get(metric))]
        x = np.array([place for place, _ in found])
        y = np.array([value for _, value in found])
        if smooth > 1 and len(y):
            sums = np.cumsum(np.insert(y, 0, 0.0))
            first = np.maximum(np.arange(len(y)) - smooth + 1, 0)
            y = (sums[1:] - sums[first]) / (np.arange(len(y)) - first + 1)
        return x, y

    def places(self, against: str) -> dict[int, float]:
        """Step → its place on the axis, counted from the beginning of the run."""
        if against == "steps":
            return {step: float(step) for step in self.rows}
        places, total = {}, 0.0
        for step, row in self.rows.items():
            if step > 0:  # step 0 is the evaluation before training
                total += self._cost(step, row, against)
            places[step] = total
        return places

    def _cost(self, step: int, row: Mapping[str, Any], against: str) -> float:
        if against == "time":
            if not _is_number(row.get("timing_s/step")):
                raise GradtraceError(f"{self.name}: step {step} has no timing_s/step; compare it against steps")
            return float(row["timing_s/step"]) - float(row.get("timing_s/testing", 0.0))
        if _is_number(row.get(COUNTS[against])):
            return float(row[COUNTS[against]])
        return self._cost_by_configuration(against)

    def _cost_by_configuration(self, against: str) -> float:
        """Estimate the counts of runs that log none: TRL does not say how many responses it sampled."""
        prompts = dig(self.config, "data.train_batch_size")
        n = dig(self.config, "rollout.n")
        selects = dig(self.config, "trainer.tracin.enable") or dig(self.config, "algorithm.dynamic_sampling.enable")
        if not _is_number(prompts) or not _is_number(n) or selects:
            raise GradtraceError(
                f"{self.name} logged no {COUNTS[against]}, and its configuration does not tell it; "
                "compare against steps or time"
            )
        remark = f"{self.name} logged no {COUNTS[against]}: taken as data.train_batch_size · rollout.n"
        if remark not in self.remarks:
            self.remarks.append(remark)
        return float(prompts) * float(n)


def load_run(path: Path) -> RunCurves:
    run = open_run(path)
    rows = run.metrics_by_step()
    if not rows:
        raise GradtraceError(f"{path} has no metrics: its metrics.jsonl is missing or empty")
    for row in rows.values():
        del row["step"]
    config = run.config
    remarks = [f"{run.name}: {problem}" for problem in run.problems]
    return RunCurves(run.name, path, config, rows, remarks, influence_unit(run))


def influence_unit(run: RunReader) -> str:
    """Of the scores of a run's last influence trace that can be read; empty where there is none."""
    for number in reversed(run.steps(INFLUENCE_TRACE)):
        for step in run.readable_steps(INFLUENCE_TRACE, [number]):
            return "nats" if "influence" in step else "influence"
    return ""


def nearest_metric(metric: str, names: list[str]) -> str:
    """ ", the nearest is …" or nothing."""
    contained = [name for name in names if metric.lower() in name.lower()]
    near = contained[:1] or difflib.get_close_matches(metric, names, 1, cutoff=0.3)
    return f", the nearest it has is {near[0]}" if near else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


IGNORED = re.compile(
    r"trainer\.(seed|name|runs_dir|logger|cpu_threads|samples_every)$|trainer\.checkpoint\.|resume$|recipe$"
)
MOST_DIFFERENCES = 4


@dataclass
class RunGroup:
    label: str
    runs: list[RunCurves]
    differs: str = ""
    """The configuration keys that tell it from the other groups, in words."""

    @property
    def seeds(self) -> list[Any]:
        """trainer.seed of each run, None where the configuration has none."""
        return [flat(run.config).get("trainer.seed") for run in self.runs]


def group_runs(runs: list[RunCurves], named: list[str] | None = None) -> list[RunGroup]:
    """Groups in the order of their first run. `named`: LABEL=GLOB, matched with names and paths of runs; runs that no
    glob matches are grouped by their configuration."""
    groups: list[RunGroup] = []
    rest = list(runs)
    for entry in named or []:
        label, separator, pattern = entry.partition("=")
        if not separator or not label or not pattern:
            raise GradtraceError(f"--group {entry}: give LABEL=GLOB, such as --group 'TracIn=tracin-*'")
        members = [run for run in rest if _matches(run, pattern)]
        if not members:
            there = ", ".join(run.name for run in runs)
            raise GradtraceError(f"--group {entry}: no run (that is left) matches {pattern}; there are {there}")
        rest = [run for run in rest if run not in members]
        groups.append(RunGroup(label, members))
    groups += _by_configuration(rest)
    _describe_differences(groups)
    return groups


def _matches(run: RunCurves, pattern: str) -> bool:
    return any(
        fnmatch.fnmatchcase(text, pattern) for text in (run.name, str(run.path), os.path.normpath(str(run.path)))
    )


def _by_configuration(runs: list[RunCurves]) -> list[RunGroup]:
    found: dict[str, list[RunCurves]] = {}
    for run in runs:
        # Without a configuration nothing says what a run is a seed of.
        key = repr(sorted(_relevant(run.config).items())) if run.config else f"no configuration {run.path}"
        found.setdefault(key, []).append(run)
    groups = [RunGroup(_common_name(members), members) for members in found.values()]
    labels = [group.label for group in groups]
    for index, group in enumerate(groups):
        if labels.count(group.label) > 1:
            group.label = f"{group.label} ({index + 1})"
    return groups


def _common_name(runs: list[RunCurves]) -> str:
    """What the names have in common, without what looks like the beginning of a seed's number."""
    if len(runs) == 1:
        return runs[0].name
    first, last = min(run.name for run in runs), max(run.name for run in runs)
    shared = next((at for at in range(len(first)) if first[at] != last[at : at + 1]), len(first))
    return re.sub(r"[-_.]+(seed|s)?[-_.=]*\d*$", "", first[:shared]) or runs[0].name


def _describe_differences(groups: list[RunGroup]) -> None:
    configs = [_relevant(group.runs[0].config) for group in groups]
    keys = sorted({key for config in configs for key in config})
    different = [key for key in keys if len({repr(config.get(key)) for config in configs}) > 1]
    for group, config in zip(groups, configs, strict=True):
        words = [f"{key}={_text(config.get(key))}" for key in different[:MOST_DIFFERENCES]]
        more = len(different) - MOST_DIFFERENCES
        group.differs = ", ".join(words) + (f" and {more} more" if more > 0 else "")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _relevant(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in flat(config).items() if not IGNORED.match(key)}
