"""Scores and comparisons as tables in the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from gradtrace.evaluation.run import Result, compare
from gradtrace.intervals import Interval
from gradtrace.terminal import say, titled_table


def show_scores(console: Console, title: str, found: dict[str, Interval], summary: dict[str, Any]) -> None:
    table = titled_table(title, "score", "value", "95 % interval")
    for name, value in found.items():
        table.add_row(name, f"{value.mean:.3f}", f"{value.low:.3f} … {value.high:.3f}")
    table.add_row("finished", f"{summary['finished']:.3f}", "")
    table.add_row("mean length, tokens", f"{summary['mean_length']:.1f}", "")
    console.print(table)


def show_comparison(console: Console, first: Result, second: Result, ks: list[int]) -> None:
    found = compare(first, second, ks)
    problems = len(first.rewards())
    say(console, f"A: {first.model}\nB: {second.model}")
    title = f"{first.settings.task}, B − A on the same {problems} problems: positive = B is better"
    table = titled_table(title, "score", "B − A", "95 % interval", "better", "worse", "equal")
    for name, pair in found.items():
        change = pair.difference
        ends = f"{change.low:+.3f} … {change.high:+.3f}" + ("" if change.excludes_zero else "  (holds 0)")
        counts = map(str, (pair.better, pair.worse, pair.equal))
        table.add_row(name, f"{change.mean:+.3f}", ends, *counts)
    console.print(table)
