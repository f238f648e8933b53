"""What `gradtrace verify` found, for people: a table in the terminal, pictures, one HTML file."""

from __future__ import annotations

import html
import math
from typing import Any

import torch
from rich.table import Table

from gradtrace.compare.picture import Curve, line_picture
from gradtrace.instruments.verify.agreement import ranks
from gradtrace.instruments.verify.measure import KINDS
from gradtrace.instruments.verify.verification import CLEAR, in_brackets, number, usual_scores
from gradtrace.intervals import Interval

Rows = list[tuple[str, list[str]]]


def rank_picture(record: dict[str, Any], key: str, kind: str = "single_token") -> str:
    """Where each step stood among those of its group, by prediction and by measurement. `key`: predicted (by the score
    that is judged) or baseline."""
    x: list[float] = []
    y: list[float] = []
    for steps in record["steps"]:
        if steps["kind"] == kind and len(steps["measured"]) > 1:
            last = len(steps["measured"]) - 1
            x += (ranks(torch.tensor(steps[key])) / last).tolist()
            y += (ranks(torch.tensor(steps["measured"])) / last).tolist()
    name = record["judged"] if key == "predicted" else record["baseline"]
    value = record["table"][name].get(kind, [None])[0]
    label = "–" if value is None else f"Spearman {number(value)}"
    return line_picture(
        [Curve(label, x, y, marks=True)],
        f"{name}: real steps on {KINDS[kind]}",
        "rank in its group by prediction (0 = hurts most, 1 = helps most)",
        "rank by what the step really did; on the line: predicted exactly",
        width=560,
        identity=True,
    )


def cells(record: dict[str, Any]) -> tuple[list[str], Rows]:
    """Column titles, and for each score its name and its cells; the best on single tokens first."""
    table = record["table"]
    kinds = [kind for kind in KINDS if any(kind in found for found in table.values())]
    order = sorted(table, key=lambda name: _sortable(table[name]["single_token"][0]))
    rows = [(name, [_cell(table[name].get(kind)) for kind in kinds]) for name in order]
    return [KINDS[kind] for kind in kinds], rows


def _cell(value: list[float | None] | None) -> str:
    if value is None or value[0] is None:
        return "–"
    mean, low, high, count = (math.nan if number is None else number for number in value)
    return in_brackets(Interval(mean, low, high, int(count)))


def _sortable(value: float | None) -> float:
    return 2.0 if value is None else -value


def better_score(record: dict[str, Any]) -> str:
    """How to set the best score of the table, where it is clearly better than the one that is judged; else empty."""
    scores = {name: found["single_token"][0] for name, found in record["table"].items() if ", " in name}
    known = {name: value for name, value in scores.items() if value is not None and name in usual_scores()}
    if not known:
        return ""
    best = max(known, key=lambda name: known[name])
    if known[best] < (record["table"][record["judged"]]["single_token"][0] or 0.0) + CLEAR:
        return ""
    config, prefix = usual_scores()[best], "trainer.influence_trace."
    knobs = {"hessian_mode": config.hessian_mode, "credit": config.credit, "projection_dim_factor": 0}
    if config.credit == "loss_term":
        knobs["loss_term_prompts"] = 0
    words = " ".join(f"{prefix}{name}={value}" for name, value in knobs.items())
    return f"A better score here is '{best}' ({number(known[best])}): {words}"


def terminal_table(record: dict[str, Any]) -> Table:
    titles, rows = cells(record)
    table = Table(
        title=f"rank correlation with real optimizer steps, step {record['step']}: mean over "
        f"{record['groups']} group{'s' * (record['groups'] != 1)} [95 %]",
        title_justify="left",
        caption=f"→ judged; no gradient at all: the |A| rows. {record['steps_taken']} of {record['steps_planned']} "
        "planned steps taken.",
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
    """One file with the verdict, the pictures and the table; no script, nothing to fetch."""
    titles, rows = cells(record)
    head = "".join(f"<th>{html.escape(title)}</th>" for title in ("score", *titles))
    body = "".join(
        f"<tr{' class=judged' if name == record['judged'] else ''}><th>{html.escape(name)}</th>"
        + "".join(f"<td>{html.escape(value)}</td>" for value in values)
        + "</tr>"
        for name, values in rows
    )
    pictures = "".join(
        f"<div>{rank_picture(record, key, kind)}</div>"
        for kind in ("single_token", "half_tokens")
        if any(steps["kind"] == kind for steps in record["steps"])
        for key in ("predicted", "baseline")
    )
    word = {True: "yes", False: "no", None: "undecided"}[record["trustworthy"]]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Can the scores of {html.escape(record["checkpoint"])} be trusted?</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }}
svg {{ max-width: 100%; height: auto; }}
.pictures {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1rem; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0; }}
td, th {{ padding: .2rem .6rem; text-align: right; white-space: nowrap; font-weight: normal; }}
td, th {{ border-bottom: 1px solid #8884; }}
th:first-child {{ text-align: left; }}
.judged {{ font-weight: bold; }} .judged th {{ font-weight: bold; }}
.verdict {{ font-size: 1.15rem; }}
</style></head><body>
<h1>Can these scores be trusted? {word}</h1>
<p class="verdict">{html.escape(record["verdict"])}.</p>
<p>{html.escape(record["checkpoint"])}, scores: {html.escape(record["scores"])}. {record["steps_taken"]} of
{record["steps_planned"]} planned steps of the real optimizer (learning rate {record["learning_rate"]:.3g}) were taken
on parts of {record["groups"]} groups, each from the same state, in {html.escape(record["precision"])}. What a step does
to the contrast of accepted and rejected responses, minus what momentum does by itself, is compared with the sum of the
scores of the tokens it was taken on: Spearman's rank correlation, mean over groups, 95 % interval (Student's t).</p>
<div class="pictures">{pictures}</div>
<table><tr>{head}</tr>{body}</table>
</body></html>
"""
