"""Who did it: which prompt, response and token made a step's gradient, entropy, reward, length or KL what it is.

examples:
  gradtrace blame runs/demo                              the step with the largest gradient, and who made it
  gradtrace blame runs/demo --step 12                    the gradient of step 12
  gradtrace blame runs/demo --what entropy               the largest entropy change, by the probe's shares
  gradtrace blame runs/demo --what reward --json         for a program

Shares of a gradient are ⟨g_r, g⟩/‖g‖² and add up to 1; a negative one pulled against the rest. It needs a blame trace
(trainer.traces=true, or trainer.blame.enable=true); docs/findings.md explains every row.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from gradtrace.commands import add_run, opened_run
from gradtrace.instruments.blame.report import WHAT, GradientReport, Part


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add = parser.add_argument
    add("--step", type=int, help="default: the step with the most to explain")
    add("--what", choices=WHAT, default="grad_norm", help="the event (default: grad_norm)")
    add("--top", type=int, default=8, help="rows of each list (default: 8)")
    add("--json", action="store_true", help="print the whole report as one JSON object")


def run(args: argparse.Namespace) -> int:
    from gradtrace.instruments.blame.report import blame

    report = blame(opened_run(args), args.what, args.step, max(1, args.top))
    if args.json:
        print(json.dumps(report.as_json(), ensure_ascii=False))
    else:
        _print(report)
    return 0


def _print(report: GradientReport) -> None:
    from rich.console import Console

    console = Console()
    console.print(report.sentence, markup=False, highlight=False, soft_wrap=True)
    lists = {
        "prompts": report.prompts,
        "responses": report.responses,
        "tokens": report.tokens,
        "equal tokens together": report.vocabulary,
        "and what no response did": report.rest,
        "moved against their own advantage (change of log-prob per unit of learning rate)": report.cancelled,
    }
    for title, parts in lists.items():
        if parts:
            console.print(_table(title, parts, report))


def _table(title: str, parts: list[Part], report: GradientReport) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    percent = report.what == "grad_norm" and parts is not report.cancelled and report.unit != "‖g_r‖"
    unit = "change" if parts is report.cancelled else report.unit
    table.add_column("share" if percent else unit, justify="right")
    table.add_column("where")
    table.add_column("text", overflow="ellipsis", no_wrap=True, max_width=60)
    table.add_column("", overflow="fold")
    for part in parts:
        value = f"{part.share:+.1%}" if percent else f"{part.share:+.4g}"
        table.add_row(value, _where(part), Text(part.text.replace("\n", "↵")), Text(part.note))
    return table


def _where(part: Part) -> str:
    places = {"prompt": part.group, "response": part.response, "token": part.position}
    return ", ".join(f"{what} {index}" for what, index in places.items() if index >= 0)
