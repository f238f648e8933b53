"""One metric of several groups of runs over one axis: mean curves with intervals, values at equal x, and how soon each
group reaches a threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradtrace.commands.compare.runs import AXES, RunCurves, RunGroup, nearest_metric
from gradtrace.commands.pages.picture import Curve, line_picture
from gradtrace.errors import GradtraceError
from gradtrace.intervals import Interval, mean_interval, paired_difference, welch_difference

GRID = 121
"""Places at which curves of unequal x are read off by linear interpolation."""


@dataclass
class GroupCurve:
    group: RunGroup
    """The runs that have the metric."""
    lines: list[tuple[np.ndarray, np.ndarray]]
    """(x, y) of every run."""
    x: np.ndarray
    intervals: list[Interval]
    """The mean at each x with its 95 % t-interval over runs."""
    at: Interval = field(default_factory=lambda: mean_interval([]))
    """The value at the x that is compared."""
    difference: Interval | None = None
    """The difference to the first group, at the x that is compared."""
    is_paired: bool = False
    reached: list[float] = field(default_factory=list)
    """x at which each run that does so first reaches the threshold."""

    @property
    def mean(self) -> np.ndarray:
        return np.array([interval.mean for interval in self.intervals])

    @property
    def half(self) -> np.ndarray:
        """Half-widths; NaN with a single run."""
        return np.array([interval.half for interval in self.intervals])

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
        counts = sorted({len(curve.lines) for curve in self.groups})
        if counts == [1]:
            return "one run each"
        seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        return f"mean and 95 % t-interval over {seeds} seeds"

    def picture(self) -> str:
        curves = []
        for each in self.groups:
            ends = [each.mean - each.half, each.mean + each.half] if len(each.lines) > 1 else []
            columns = [each.x, each.mean, *ends]
            curves.append(Curve(each.group.label, *(column.tolist() for column in columns)))
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
                    "label": curve.group.label,
                    "differs": curve.group.differs,
                    "runs": [run.name for run in curve.group.runs],
                    "seeds": curve.group.seeds,
                    "at": _plain(curve.at),
                    "final": _plain(curve.intervals[-1]),
                    "difference_to_first": _plain(curve.difference) if curve.difference else None,
                    "difference_is_paired": curve.is_paired,
                    "reached": curve.reached,
                    "x": curve.x.tolist(),
                    "mean": curve.mean.tolist(),
                    "half_width": [None if math.isnan(value) else value for value in curve.half.tolist()],
                }
                for curve in self.groups
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
    """Raises `GradtraceError` if no run has the metric, or if it is one of scores in different units. Remarks on the
    runs that lack it."""
    _check_units(groups, metric)
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
                f"{curve.group.label} cannot be compared at {against} = {place:g}: it has {metric} from {low:g} to "
                f"{high:g}"
            )
        curve.at = mean_interval(curve.values_at(place))
    for curve in curves[1:]:
        curve.difference, curve.is_paired = _difference(curve, curves[0], place)
    finals = [curve.mean[-1] for curve in curves]
    rises = sum(final - curve.mean[0] for final, curve in zip(finals, curves, strict=True)) >= 0
    if threshold is None:
        threshold = min(finals) if rises else max(finals)
    for curve in curves:
        crossings = [_first_reach(xs, ys, threshold, rises) for xs, ys in curve.lines]
        curve.reached = [x for x in crossings if x is not None]
    remarks += [remark for group in groups for run in group.runs for remark in run.remarks]
    return Comparison(metric, against, float(place), float(threshold), bool(rises), curves, remarks)


def _check_units(groups: list[RunGroup], metric: str) -> None:
    """Scores in nats and scores of captured factors measure different things."""
    runs = [run for group in groups for run in group.runs if run.influence_unit]
    by_unit = {unit: [run.name for run in runs if run.influence_unit == unit] for unit in ("nats", "influence")}
    if metric.startswith("influence_trace/") and all(by_unit.values()):
        raise GradtraceError(
            f"{metric} cannot be compared: influence is in nats in {', '.join(by_unit['nats'])}, and in the unit of "
            f"captured factors in {', '.join(by_unit['influence'])}. Compare runs of one kind, or another metric"
        )


def _curve(group: RunGroup, metric: str, against: str, smooth: int, remarks: list[str]) -> GroupCurve | None:
    runs: list[RunCurves] = []
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
    if all(np.array_equal(xs, lines[0][0]) for xs, _ in lines):
        grid = lines[0][0]
    else:
        low, high = max(xs[0] for xs, _ in lines), min(xs[-1] for xs, _ in lines)
        if low > high:
            raise GradtraceError(f"the runs of {group.label} have no {against} in common; compare them one by one")
        grid = np.linspace(low, high, GRID) if high > low else np.array([low])
    curve = GroupCurve(RunGroup(group.label, runs, group.differs), lines, grid, [])
    curve.intervals = [mean_interval(curve.values_at(x)) for x in grid]
    return curve


def _difference(curve: GroupCurve, base: GroupCurve, place: float) -> tuple[Interval, bool]:
    """Of the values at a place, and whether it is paired: seed by seed, where both have the same ones."""
    own, other = (dict(zip(map(repr, each.group.seeds), each.values_at(place), strict=False)) for each in (curve, base))
    is_paired = own.keys() == other.keys() and len(own) == len(curve.lines) == len(base.lines) > 1
    if is_paired and None not in curve.group.seeds:
        return paired_difference(list(own.values()), [other[seed] for seed in own]), True
    return welch_difference(curve.values_at(place), base.values_at(place)), False


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
