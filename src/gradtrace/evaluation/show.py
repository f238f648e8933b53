"""Scores and comparisons as tables in the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from gradtrace.evaluation.compare import compare
from gradtrace.evaluation.run import Result
from gradtrace.intervals import Interval


def show_scores(console: Console, title: str, found: dict[str, Interval], summary: dict[str, Any]) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("score")
    table.add_column("value", justify="right")
    table.add_column("95 % interval", justify="right")
    for name, value in found.items():
        table.add_row(name, f"{value.mean:.3f}", f"{value.low:.3f} … {value.high:.3f}")
    table.add_row("finished", f"{summary['finished']:.3f}", "")
    table.add_row("mean length, tokens", f"{summary['mean_length']:.1f}", "")
    console.print(table)


def show_comparison(console: Console, first: Result, second: Result, ks: list[int]) -> None:
    found = compare(first, second, ks)
    problems = len(first.rewards())
    console.print(f"A: {first.model}\nB: {second.model}", highlight=False, soft_wrap=True)
    table = Table(
        title=f"{first.settings.task}, B − A on the same {problems} problems: positive = B is better",
        title_justify="left",
    )
    table.add_column("score")
    for heading in ("B − A", "95 % interval", "better", "worse", "equal"):
        table.add_column(heading, justify="right")
    for name, pair in found.items():
        change = pair.difference
        table.add_row(
            name,
            f"{change.mean:+.3f}",
            f"{change.low:+.3f} … {change.high:+.3f}" + ("" if change.excludes_zero else "  (holds 0)"),
            str(pair.better),
            str(pair.worse),
            str(pair.equal),
        )
    console.print(table)
