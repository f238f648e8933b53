"""A run as `compare` sees it: metrics by step, and what a step costs on each axis."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gradtrace.errors import GradtraceError
from gradtrace.trace.reader import dig, open_run

AXES = {
    "steps": "training steps",
    "trained": "responses trained on",
    "generated": "responses generated, validation rollouts of TracIn included",
    "time": "seconds of training, evaluation left out",
}
COUNTS = {"trained": "perf/trained_responses", "generated": "perf/generated_responses"}


@dataclass
class LoadedRun:
    name: str
    path: Path
    config: dict[str, Any]
    rows: dict[int, dict[str, Any]]
    """Metrics by step, ascending; where a resumed run wrote a step twice, the later line."""
    remarks: list[str] = field(default_factory=list)
    """What a reader of the comparison should know about this run."""

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
        """Estimate the counts of runs that were logged before there were counts."""
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


def load_run(path: Path) -> LoadedRun:
    run = open_run(path)
    rows = run.metrics_by_step()
    if not rows:
        raise GradtraceError(f"{path} has no metrics: its metrics.jsonl is missing or empty")
    for row in rows.values():
        del row["step"]
    config = run.config
    remarks = [f"{run.name}: {problem}" for problem in run.problems]
    return LoadedRun(run.name, path, config, rows, remarks)


def nearest_metric(metric: str, names: list[str]) -> str:
    """ ", the nearest is …" or nothing."""
    contained = [name for name in names if metric.lower() in name.lower()]
    near = contained[:1] or difflib.get_close_matches(metric, names, 1, cutoff=0.3)
    return f", the nearest it has is {near[0]}" if near else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
