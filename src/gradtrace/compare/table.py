"""A comparison as a table: the same cells in the terminal and in the HTML page."""

from __future__ import annotations

import math

from gradtrace.compare.comparison import Comparison, GroupCurve
from gradtrace.intervals import Interval, mean_interval

_UNITS = {"steps": "steps", "trained": "trained responses", "generated": "generated responses", "time": "s"}


def table_cells(comparison: Comparison) -> tuple[list[str], list[list[str]], str]:
    """(headings, rows, caption); the last column, in what a group differs, may be long."""
    unit = _UNITS[comparison.against]
    head = ["group", "seeds", f"at {_number(comparison.at)} {unit}"]
    has_difference = len(comparison.groups) > 1
    if has_difference:
        head.append("minus the first")
    sign = "≥" if comparison.rises else "≤"
    head += [f"{unit} until {sign} {_number(comparison.threshold)}", "differs in"]
    rows = []
    for group in comparison.groups:
        row = [group.label, str(len(group.runs)), interval_text(group.at)]
        if has_difference:
            row.append("" if group.difference is None else interval_text(group.difference, signed=True))
        rows.append([*row, _reach_text(group), group.differs])
    return head, rows, _caption(comparison)


def _caption(comparison: Comparison) -> str:
    words = [f"{comparison.metric}."]
    if any(len(group.runs) > 1 for group in comparison.groups):
        words.append("±: half-width of the 95 % t-interval of the mean over seeds.")
        kinds = {group.is_paired for group in comparison.groups if group.difference is not None}
        if kinds == {True}:
            words.append("Differences are taken seed by seed (paired).")
        elif False in kinds:
            words.append("Differences are of independent samples (Welch) where the seeds are not the same.")
    else:
        words.append("One run each: no interval; a difference may be luck.")
    words.append("Values between logged points are interpolated on a line.")
    return " ".join(words)


def interval_text(interval: Interval, signed: bool = False) -> str:
    if math.isnan(interval.mean):
        return "–"
    decimals = _decimals(interval)
    text = f"{interval.mean:+.{decimals}f}" if signed else f"{interval.mean:.{decimals}f}"
    if not math.isnan(interval.half):
        text += f" ± {interval.half:.{decimals}f}"
    return text.replace("-", "\u2212")


def _decimals(interval: Interval) -> int:
    """Two digits of the uncertainty, three of a value that has none."""
    size = interval.half if interval.half > 0 else abs(interval.mean)
    digits = 1 if interval.half > 0 else 2
    return 3 if not size > 0 or math.isinf(size) else max(0, min(8, digits - math.floor(math.log10(size))))


def _reach_text(group: GroupCurve) -> str:
    if not group.reached:
        return "never"
    reached = mean_interval(group.reached)
    text = _number(reached.mean) if math.isnan(reached.half) else f"{_number(reached.mean)} ± {_number(reached.half)}"
    missing = len(group.runs) - len(group.reached)
    return f"{text} ({len(group.reached)} of {len(group.runs)} seeds)" if missing else text


def _number(value: float) -> str:
    if value == round(value) and abs(value) < 1e12:
        return f"{value:,.0f}".replace("-", "\u2212")
    return f"{value:,.4g}".replace("-", "\u2212") if abs(value) < 1e4 else f"{value:,.0f}"


def remarks_of(comparisons: list[Comparison]) -> list[str]:
    """Every remark once, in order."""
    return list(dict.fromkeys(remark for comparison in comparisons for remark in comparison.remarks))
