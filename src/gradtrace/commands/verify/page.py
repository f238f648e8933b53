"""What `gradtrace verify` found, for people: a table in the terminal, pictures, one HTML file."""

from __future__ import annotations

import math
from typing import Any

import torch
from rich.table import Table

from gradtrace.commands.pages import html_page, html_table
from gradtrace.commands.pages.picture import Curve, escape, line_picture
from gradtrace.instruments.verify.measure import KINDS, ranks
from gradtrace.instruments.verify.verification import CLEAR, in_brackets, number, usual_scores
from gradtrace.intervals import Interval


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


def cells(record: dict[str, Any]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Column titles, and for each score its name and its cells; the best on single tokens first."""
    table = record["table"]
    kinds = [kind for kind in KINDS if any(kind in found for found in table.values())]
    single = {name: found["single_token"][0] for name, found in table.items()}
    order = sorted(table, key=lambda name: 2.0 if single[name] is None else -single[name])
    rows = [(name, [_cell(table[name].get(kind)) for kind in kinds]) for name in order]
    return [KINDS[kind] for kind in kinds], rows


def _cell(value: list[float | None] | None) -> str:
    if value is None or value[0] is None:
        return "–"
    mean, low, high, count = (math.nan if number is None else number for number in value)
    return in_brackets(Interval(mean, low, high, int(count)))


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
    """The verdict, the pictures and the table."""
    titles, rows = cells(record)
    pictures = "".join(
        f"<div>{rank_picture(record, key, kind)}</div>"
        for kind in ("single_token", "half_tokens")
        if any(steps["kind"] == kind for steps in record["steps"])
        for key in ("predicted", "baseline")
    )
    word = {True: "yes", False: "no", None: "undecided"}[record["trustworthy"]]
    about = (
        f"Scores: {record['scores']}. {record['steps_taken']} of {record['steps_planned']} planned "
        f"steps of the real optimizer (learning rate {record['learning_rate']:.3g}) were taken on parts of "
        f"{record['groups']} groups, each from the same state, in {record['precision']}. What a step does to the "
        "contrast of accepted and rejected responses, minus what momentum does by itself, is compared with the sum of "
        "the scores of the tokens it was taken on: Spearman's rank correlation, mean over groups, 95 % interval "
        "(Student's t)."
    )
    return html_page(
        f"Can the scores of {record['checkpoint']} be trusted? {word}",
        f'<p class="verdict">{escape(record["verdict"])}.</p>',
        f"<p>{escape(about)}</p>",
        f'<div class="pictures">{pictures}</div>',
        html_table(("score", *titles), [(name, *values) for name, values in rows], marked=record["judged"]),
    )
