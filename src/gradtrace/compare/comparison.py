"""One metric of several groups of runs over one axis: mean curves with intervals, values at equal x, and how soon each
group reaches a threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradtrace.compare.grouping import RunGroup
from gradtrace.compare.picture import Curve, line_picture
from gradtrace.compare.runs import AXES, LoadedRun, nearest_metric
from gradtrace.errors import GradtraceError
from gradtrace.intervals import Interval, mean_interval, paired_difference, welch_difference

GRID = 121
"""Places at which curves of unequal x are read off by linear interpolation."""


@dataclass
class GroupCurve:
    label: str
    differs: str
    runs: list[str]
    seeds: list[Any]
    lines: list[tuple[np.ndarray, np.ndarray]]
    """(x, y) of every run."""
    x: np.ndarray
    mean: np.ndarray
    half: np.ndarray
    """Half-width of the 95 % t-interval over runs; NaN with a single run."""
    final: Interval
    """The value at the end of the shortest run of the group."""
    at: Interval = field(default_factory=lambda: mean_interval([]))
    """The value at the x that is compared."""
    difference: Interval | None = None
    """The difference to the first group, at the x that is compared."""
    is_paired: bool = False
    reached: list[float] = field(default_factory=list)
    """x at which each run that does so first reaches the threshold."""

    def values_at(self, x: float) -> list[float]:
        return [float(np.interp(x, xs, ys)) for xs, ys in self.lines]


@dataclass
class Comparison:
    metric: str
    against: str
    at: float
    """The x at which groups are compared: the furthest that every group got to, unless asked for."""
    threshold: float
    rises: bool
    """Whether a higher value is better, so that the threshold is reached from below."""
    groups: list[GroupCurve]
    remarks: list[str]

    @property
    def interval_words(self) -> str:
        counts = sorted({len(group.runs) for group in self.groups})
        if counts == [1]:
            return "one run each"
        seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        return f"mean and 95 % t-interval over {seeds} seeds"

    def picture(self) -> str:
        curves = []
        for group in self.groups:
            ends = [group.mean - group.half, group.mean + group.half] if len(group.runs) > 1 else []
            columns = [group.x, group.mean, *ends]
            curves.append(Curve(group.label, *(column.tolist() for column in columns)))
        return line_picture(curves, self.metric, AXES[self.against], self.interval_words)

    def to_json(self) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "against": self.against,
            "interval": "95 % t-interval over seeds",
            "compared_at": self.at,
            "threshold": self.threshold,
            "threshold_reached_from": "below" if self.rises else "above",
            "groups": [
                {
                    "label": group.label,
                    "differs": group.differs,
                    "runs": group.runs,
                    "seeds": group.seeds,
                    "at": _plain(group.at),
                    "final": _plain(group.final),
                    "difference_to_first": _plain(group.difference) if group.difference else None,
                    "difference_is_paired": group.is_paired,
                    "reached": group.reached,
                    "x": group.x.tolist(),
                    "mean": group.mean.tolist(),
                    "half_width": [None if math.isnan(value) else value for value in group.half.tolist()],
                }
                for group in self.groups
            ],
            "remarks": self.remarks,
        }


def _plain(interval: Interval) -> dict[str, Any]:
    half = None if math.isnan(interval.half) else interval.half
    return {"mean": interval.mean, "half_width": half, "n": interval.count}


def compare(
    groups: list[RunGroup],
    metric: str,
    against: str = "steps",
    *,
    at: float | None = None,
    threshold: float | None = None,
    smooth: int = 1,
) -> Comparison:
    """Raises `GradtraceError` if no run has the metric, and remarks on the runs that lack it."""
    remarks: list[str] = []
    curves = [curve for group in groups if (curve := _curve(group, metric, against, smooth, remarks))]
    if not curves:
        names = sorted({name for group in groups for run in group.runs for name in run.metric_names})
        raise GradtraceError(
            f"no run has the metric {metric}{nearest_metric(metric, names)}. "
            "`gradtrace compare RUN… --list` shows all metrics"
        )
    place = min(curve.x[-1] for curve in curves) if at is None else at
    for curve in curves:
        low, high = max(xs[0] for xs, _ in curve.lines), min(xs[-1] for xs, _ in curve.lines)
        if not low <= place <= high:
            raise GradtraceError(
                f"{curve.label} cannot be compared at {against} = {place:g}: it has {metric} from {low:g} to {high:g}"
            )
        curve.at = mean_interval(curve.values_at(place))
    for curve in curves[1:]:
        curve.is_paired = _same_seeds(curve, curves[0])
        curve.difference = _difference(curve, curves[0], place)
    rises = sum(curve.final.mean - curve.mean[0] for curve in curves) >= 0
    finals = [curve.final.mean for curve in curves]
    if threshold is None:
        threshold = min(finals) if rises else max(finals)
    for curve in curves:
        found = [_first_reach(xs, ys, threshold, rises) for xs, ys in curve.lines]
        curve.reached = [x for x in found if x is not None]
    remarks += [remark for group in groups for run in group.runs for remark in run.remarks]
    return Comparison(metric, against, float(place), float(threshold), bool(rises), curves, remarks)


def _curve(group: RunGroup, metric: str, against: str, smooth: int, remarks: list[str]) -> GroupCurve | None:
    runs: list[LoadedRun] = []
    lines = []
    for run in group.runs:
        xs, ys = run.series(metric, against, smooth)
        if len(xs) == 0:
            remarks.append(f"{run.name} is left out: it has no {metric}{nearest_metric(metric, run.metric_names)}")
            continue
        runs.append(run)
        lines.append((xs, ys))
    if not runs:
        return None
    present = RunGroup(group.label, runs)
    if all(len(xs) == len(lines[0][0]) and np.array_equal(xs, lines[0][0]) for xs, _ in lines):
        grid = lines[0][0]
    else:
        low, high = max(xs[0] for xs, _ in lines), min(xs[-1] for xs, _ in lines)
        if low > high:
            raise GradtraceError(f"the runs of {group.label} have no {against} in common; compare them one by one")
        grid = np.linspace(low, high, GRID) if high > low else np.array([low])
    values = [[float(np.interp(x, xs, ys)) for xs, ys in lines] for x in grid]
    intervals = [mean_interval(column) for column in values]
    return GroupCurve(
        group.label,
        group.differs,
        [run.name for run in runs],
        present.seeds,
        lines,
        grid,
        np.array([interval.mean for interval in intervals]),
        np.array([interval.half for interval in intervals]),
        intervals[-1],
    )


def _same_seeds(curve: GroupCurve, base: GroupCurve) -> bool:
    seeds = [repr(seed) for seed in curve.seeds]
    same = sorted(seeds) == sorted(repr(seed) for seed in base.seeds)
    return same and len(set(seeds)) == len(seeds) > 1 and None not in curve.seeds


def _difference(curve: GroupCurve, base: GroupCurve, place: float) -> Interval:
    if not curve.is_paired:
        return welch_difference(curve.values_at(place), base.values_at(place))
    own = dict(zip(map(repr, curve.seeds), curve.values_at(place), strict=True))
    other = dict(zip(map(repr, base.seeds), base.values_at(place), strict=True))
    return paired_difference([own[seed] for seed in own], [other[seed] for seed in own])


def _first_reach(xs: np.ndarray, ys: np.ndarray, threshold: float, rises: bool) -> float | None:
    """The x at which the line first touches the threshold; None if it never does."""
    sign = 1.0 if rises else -1.0
    slack = 1e-9 * max(1.0, abs(threshold))  # the group whose end is the threshold does reach it
    above = sign * (ys - threshold) >= -slack
    if not above.any():
        return None
    first = int(above.argmax())
    if first == 0 or ys[first] == ys[first - 1]:
        return float(xs[first])
    share = (threshold - ys[first - 1]) / (ys[first] - ys[first - 1])
    return float(xs[first - 1] + min(1.0, max(0.0, share)) * (xs[first] - xs[first - 1]))
