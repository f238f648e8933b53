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
from pathlib import Path

from gradtrace.compare.comparison import Comparison, compare
from gradtrace.compare.grouping import RunGroup, group_runs
from gradtrace.compare.page import comparison_page
from gradtrace.compare.runs import AXES, load_run
from gradtrace.compare.table import remarks_of, table_cells
from gradtrace.errors import GradtraceError
from gradtrace.terminal import say
from gradtrace.trace.atomic import atomic_write

FORMATS = (".html", ".svg", ".json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="run folders, or names in --runs-dir")
    add("--runs-dir", default="runs", help="where runs are looked up by name (default: runs)")
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
    from gradtrace.viewer.view import chosen_runs

    output = Path(args.output) if args.output else None
    if output is not None and output.suffix not in FORMATS:
        raise GradtraceError(f"-o {output}: the name must end in {', '.join(FORMATS)}")
    if args.smooth < 1:
        raise GradtraceError(f"--smooth {args.smooth}: give the number of values to average, 1 or more")
    unique = {path.resolve(): path for path in chosen_runs(args.runs, Path(args.runs_dir))}
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
    try:
        atomic_write(output, text.encode("utf-8", "replace"))
    except OSError as error:
        raise GradtraceError(f"cannot write {output}: {error.strerror}") from error
    print(f"{output}: {len(text) / 1000:.0f} kB")
