"""What `gradtrace verify` found, for people: a table in the terminal, pictures, one HTML file."""

from __future__ import annotations

import math
from typing import Any

import torch
from rich.table import Table

from gradtrace.commands.pages import html_page, html_table
from gradtrace.commands.pages.picture import Curve, escape, line_picture
from gradtrace.instruments.verify.measure import KINDS, ranks
from gradtrace.instruments.verify.verification import ASKED, DONE, TITLES, in_brackets, number
from gradtrace.intervals import Interval

SHOWN = ("token", "token_pearson", "token_own", "response", "half", DONE)
"""Questions that have a column in the terminal; report.json has all of them."""


def rank_picture(record: dict[str, Any], key: str, kind: str = "token") -> str:
    """Where each step stood among those of the mini-batch, by prediction and by measurement. `key`: predicted (by the
    score that is judged) or baseline."""
    did_key = "measured_own" if record["question"] == ASKED["token_own"] else "measured"
    pairs = [
        (said, did)
        for steps in record["steps"]
        if steps["kind"] == kind
        for said, did in zip(steps[key], steps[did_key], strict=True)
        if said is not None
    ]
    values = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2)
    x, y = (ranks(side) / max(len(pairs) - 1, 1) for side in values.T)
    name = record["judged"] if key == "predicted" else record["baseline"]
    return line_picture(
        [Curve(f"{len(pairs)} steps", x.tolist(), y.tolist(), marks=True)],
        f"{name}: real steps on {KINDS[kind]}",
        "rank by prediction (0 = hurts most, 1 = helps most)",
        "rank by what the step really did; on the line: predicted exactly",
        width=560,
        identity=True,
    )


def cells(record: dict[str, Any]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Column titles, and for each score its name and its cells; the best on single tokens first."""
    table = record["table"]
    there = [name for name in SHOWN if any(name in found for found in table.values())]
    single = {name: found["token"][0] for name, found in table.items()}
    order = sorted(table, key=lambda name: 2.0 if single[name] is None else -single[name])
    return [TITLES[name] for name in there], [(name, [_cell(table[name].get(key)) for key in there]) for name in order]


def _cell(value: list[float | None] | None) -> str:
    if value is None or value[0] is None:
        return "–"
    mean, low, high, count = (math.nan if number is None else number for number in value)
    return in_brackets(Interval(mean, low, high, int(count)))


def books_sentence(record: dict[str, Any]) -> str:
    """How the sums of the judged scores over groups compare with what the step did to them; empty where unknown."""
    books = record["books"]
    if books["slope"] is None or books["pearson"] is None:
        return ""
    return (
        f"Sum over a group against the measured change of its objective, without momentum's: slope "
        f"{number(books['slope'])}, Pearson {number(books['pearson'])} over {len(books['measured'])} groups"
    )


def terminal_table(record: dict[str, Any]) -> Table:
    titles, rows = cells(record)
    table = Table(
        title=f"rank correlation with the change of the mini-batch's objective by real optimizer steps, step "
        f"{record['step']}: {record['groups']} group{'s' * (record['groups'] != 1)} [95 %]",
        title_justify="left",
        caption=f"→ judged; no gradient at all: the |A| rows. {record['steps_taken']} of {record['steps_planned']} "
        "planned pairs of steps taken.",
        caption_justify="left",
    )
    table.add_column("score", no_wrap=True)
    for title in titles:
        table.add_column(title, justify="right")
    for name, values in rows:
        style = "bold" if name == record["judged"] else "dim" if name == record["baseline"] else ""
        table.add_row(f"→ {name}" if name == record["judged"] else f"  {name}", *values, style=style)
    return table


def page(record: dict[str, Any]) -> str:
    """The verdict, the pictures and the table."""
    titles, rows = cells(record)
    pictures = "".join(
        f"<div>{rank_picture(record, key, kind)}</div>"
        for kind in ("token", "half")
        if any(steps["kind"] == kind for steps in record["steps"])
        for key in ("predicted", "baseline")
    )
    word = {True: "yes", False: "no", None: "undecided"}[record["trustworthy"]]
    about = (
        f"Scores: {record['scores']}. The question: {record['question']}? {record['steps_taken']} of "
        f"{record['steps_planned']} planned pairs of steps of the real optimizer (learning rate "
        f"{record['learning_rate']:.3g}) were taken from the same state, in {record['precision']}: with the gradient "
        "of the whole mini-batch, in which a token, a response or half of a group's tokens weighs half as much again, "
        "and half as much. The difference of the objective between the two, in nats, is compared with the sum of the "
        "scores: Spearman's rank correlation (Pearson's where named) over all steps of the mini-batch, 95 % "
        "interval by the jackknife over groups. In their own prompt: with the change of the own prompt's part of the "
        "objective, mean over groups. What the step did to it: with the change of the token's own term."
    )
    return html_page(
        f"Can the scores of {record['checkpoint']} be trusted? {word}",
        f'<p class="verdict">{escape(record["verdict"])}.</p>',
        f"<p>{escape(books)}.</p>" if (books := books_sentence(record)) else "",
        f"<p>{escape(about)}</p>",
        f'<div class="pictures">{pictures}</div>',
        html_table(("score", *titles), [(name, *values) for name, values in rows], marked=record["judged"]),
    )
