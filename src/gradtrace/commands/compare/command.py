"""Compare runs: mean curves with intervals over seeds, values at equal cost, and how soon each gets somewhere.

    gradtrace compare runs/grpo-s* runs/tracin-s*               the validation reward, against steps
    gradtrace compare runs/* --against generated                at equal numbers of generated responses
    gradtrace compare runs/* --metric actor/entropy --metric critic/rewards/mean -o compare.html
    gradtrace compare runs/* --group 'GRPO=grpo-*' --group 'TracIn=tracin-*' --threshold 0.8
    gradtrace compare runs/* --list                             the metrics that there are

Runs with the same configuration apart from trainer.seed (and names, logging, checkpoints) are seeds of one group.
Intervals are 95 % t-intervals over seeds. Axes: steps; trained, the responses that updates used; generated, all
responses sampled, the validation rollouts of TracIn included; time, seconds of training without evaluation.

-o writes .html (pictures and tables in one file), .svg (one picture) or .json (all numbers).
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from gradtrace.commands import add_runs_dir
from gradtrace.commands.compare.comparison import Comparison, GroupCurve, compare
from gradtrace.commands.compare.runs import AXES, RunGroup, group_runs, load_run
from gradtrace.commands.pages import html_page, html_table, write_page
from gradtrace.commands.pages.picture import escape
from gradtrace.errors import GradtraceError
from gradtrace.intervals import Interval, mean_interval
from gradtrace.terminal import say

FORMATS = (".html", ".svg", ".json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="run folders, or names in --runs-dir")
    add_runs_dir(parser)
    add(
        "--metric",
        action="append",
        metavar="NAME",
        help="may be repeated; default: the validation reward, else critic/rewards/mean",
    )
    add("--against", action="append", choices=list(AXES), help="the axis; may be repeated (default: steps)")
    add("--group", action="append", metavar="LABEL=GLOB", help="a group of your own; may be repeated")
    add("--at", type=float, metavar="X", help="compare there; default: as far as all groups got")
    add(
        "--threshold",
        type=float,
        metavar="Y",
        help="how soon is it reached; default: what the weakest group ends with",
    )
    add("--smooth", type=int, default=1, metavar="N", help="mean over the last N logged values (default: 1)")
    add("-o", "--output", metavar="FILE", help="write FILE.html, FILE.svg or FILE.json")
    add("--list", action="store_true", help="list the metrics that the runs have, and stop")


def run(args: argparse.Namespace) -> int:
    from gradtrace.viewer.catalog import chosen_runs

    output = Path(args.output) if args.output else None
    if output is not None and output.suffix not in FORMATS:
        raise GradtraceError(f"-o {output}: the name must end in {', '.join(FORMATS)}")
    if args.smooth < 1:
        raise GradtraceError(f"--smooth {args.smooth}: give the number of values to average, 1 or more")
    unique = {path.resolve(): path for path in chosen_runs(args.runs, args.runs_dir)}
    runs = [load_run(path) for path in unique.values()]
    if args.list:
        for name in sorted({name for each in runs for name in each.metric_names}):
            print(name)
        return 0
    groups = group_runs(runs, args.group)
    comparisons = [
        compare(groups, metric, against, at=args.at, threshold=args.threshold, smooth=args.smooth)
        for metric in args.metric or [default_metric(groups)]
        for against in args.against or ["steps"]
    ]
    _print(comparisons)
    if output is not None:
        _write(output, comparisons, groups)
    return 0


def default_metric(groups: list[RunGroup]) -> str:
    """The first validation mean that every run has, else the training reward."""
    names = [set(run.metric_names) for group in groups for run in group.runs]
    shared = sorted(set.intersection(*names))
    validation = [name for name in shared if name.startswith("val-core/") and "/mean@" in name]
    return validation[0] if validation else "critic/rewards/mean"


def _print(comparisons: list[Comparison]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for comparison in comparisons:
        head, rows, caption = table_cells(comparison)
        title = Text(f"{comparison.metric} against {AXES[comparison.against]}")
        table = Table(title=title, title_justify="left")
        for name in head[:-1]:
            table.add_column(Text(name), overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row[:-1]))
        console.print(table)
        for label, *_, differs in rows:  # too wide for a column
            if differs:
                say(console, f"{label}: {differs}", style="dim")
        console.print(caption, style="dim", highlight=False, markup=False)
    for remark in remarks_of(comparisons):
        say(console, f"note: {remark}")


def _write(output: Path, comparisons: list[Comparison], groups: list[RunGroup]) -> None:
    if output.suffix == ".svg":
        if len(comparisons) > 1:
            raise GradtraceError(
                f"-o {output}: an SVG holds one picture, and {len(comparisons)} were asked for; "
                "name one --metric and one --against, or write .html"
            )
        text = comparisons[0].picture()
    elif output.suffix == ".json":
        text = json.dumps({"comparisons": [each.to_json() for each in comparisons]}, indent=1) + "\n"
    else:
        text = comparison_page(comparisons, " · ".join(group.label for group in groups))
    write_page(output, text)
    print(f"{output}: {len(text) / 1000:.0f} kB")


# ---------------------------------------------------------------- the same cells in the terminal and on the page

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
    for curve in comparison.groups:
        row = [curve.group.label, str(len(curve.lines)), interval_text(curve.at)]
        if has_difference:
            row.append("" if curve.difference is None else interval_text(curve.difference, signed=True))
        rows.append([*row, _reach_text(curve), curve.group.differs])
    return head, rows, _caption(comparison)


def _caption(comparison: Comparison) -> str:
    words = [f"{comparison.metric}."]
    if any(len(curve.lines) > 1 for curve in comparison.groups):
        words.append("±: half-width of the 95 % t-interval of the mean over seeds.")
        kinds = {curve.is_paired for curve in comparison.groups if curve.difference is not None}
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


def _reach_text(curve: GroupCurve) -> str:
    if not curve.reached:
        return "never"
    reached = mean_interval(curve.reached)
    text = _number(reached.mean) if math.isnan(reached.half) else f"{_number(reached.mean)} ± {_number(reached.half)}"
    missing = len(curve.lines) - len(curve.reached)
    return f"{text} ({len(curve.reached)} of {len(curve.lines)} seeds)" if missing else text


def _number(value: float) -> str:
    if value == round(value) and abs(value) < 1e12:
        return f"{value:,.0f}".replace("-", "\u2212")
    return f"{value:,.4g}".replace("-", "\u2212") if abs(value) < 1e4 else f"{value:,.0f}"


def remarks_of(comparisons: list[Comparison]) -> list[str]:
    """Every remark once, in order."""
    return list(dict.fromkeys(remark for comparison in comparisons for remark in comparison.remarks))


def comparison_page(comparisons: list[Comparison], title: str) -> str:
    remarks = [f"<p>{escape(remark)}</p>" for remark in remarks_of(comparisons)]
    return html_page(title, *remarks, *(_section(comparison) for comparison in comparisons))


def _section(comparison: Comparison) -> str:
    head, rows, caption = table_cells(comparison)
    table = html_table(head, rows, "last-wide")
    return f"<section>\n{comparison.picture()}{table}\n<p>{escape(caption)}</p>\n</section>"
