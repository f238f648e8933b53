"""The report of a probe for people: a table in the terminal, pictures, one HTML file."""

from __future__ import annotations

import math
from typing import Any

from rich.table import Table

from gradtrace.commands.pages import html_page, html_table
from gradtrace.commands.pages.picture import Curve, escape, line_picture
from gradtrace.instruments.entropy_probe.estimates import Estimate
from gradtrace.terminal import titled_table


def identity_picture(record: dict[str, Any]) -> str:
    """Predicted against measured over η. Bars: of predicted minus measured, since on one E both share their noise."""
    rows = record["sweep"]
    measured = [row["measured"] for row in rows]
    bars = [row["difference_half"] for row in rows]
    curves = [
        Curve(
            "same E",
            [row["predicted"] for row in rows],
            measured,
            [value - bar for value, bar in zip(measured, bars, strict=True)],
            [value + bar for value, bar in zip(measured, bars, strict=True)],
            marks=True,
        )
    ]
    return line_picture(
        curves,
        f"Entropy change of the update at step {record['step']}, η from {rows[0]['eta']:g} to {rows[-1]['eta']:g} × lr",
        "predicted ΔH, nats per token",
        "measured ΔH, nats per token; bars: 95 % of the difference; line: measured = predicted",
        identity=True,
    )


def sweep_picture(record: dict[str, Any]) -> str:
    """log10 |ΔH| over log10 η."""
    rows = record["sweep"]
    x = [math.log10(row["eta"]) for row in rows]

    def curve(label: str, key: str, marks: bool) -> Curve:
        return Curve(label, x, [_log(row.get(key, 0.0)) for row in rows], marks=marks)

    curves = [curve("predicted", "predicted", False), curve("measured, same E", "measured", True)]
    if any("fresh" in row for row in rows):
        curves.append(curve("measured, fresh samples", "fresh", True))
    return line_picture(
        curves,
        "Size of the entropy change over the step size",
        "log10 (η / lr)",
        "log10 |ΔH|, nats per token",
    )


def _log(value: float) -> float:
    return math.log10(abs(value)) if value else math.nan


SWEEP_HEAD = (
    *("η / lr", "predicted", "measured, same E", "predicted − measured"),
    *("ESS", "fresh samples", "of them new"),
)


def sweep_rows(record: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            f"{row['eta']:g}",
            _with_error(row["predicted"], row["predicted_half"]),
            _with_error(row["measured"], row["measured_half"]),
            _with_error(row["predicted"] - row["measured"], row["difference_half"]),
            f"{row['ess']:.1f}",
            _with_error(row["fresh"], row["fresh_half"]) if "fresh" in row else "",
            f"{row['fresh_changed']}" if "fresh" in row else "",
        )
        for row in record["sweep"]
    ]


def sweep_table(record: dict[str, Any]) -> Table:
    """The sweep as a table for the terminal."""
    title = f"entropy change at step {record['step']}, nats per token of E (±: 95 % interval)"
    return titled_table(title, *SWEEP_HEAD, rows=sweep_rows(record), left=0)


def summary_table(record: dict[str, Any]) -> Table:
    return titled_table("the update at η = lr", "", "", rows=summary_rows(record))


def summary_rows(record: dict[str, Any]) -> list[tuple[str, str]]:
    shares = record["shares"]
    evaluation, update, slope = record["evaluation"], record["update"], record["log_log_slope"]
    order = sorted(range(len(shares["responses"])), key=lambda r: shares["responses"][r])
    lowest, highest = order[0], order[-1]
    return [
        ("optimizer, learning rate", f"{record['optimizer']}, {record['learning_rate']:.3g}"),
        ("gradient norm, clipped by", f"{record['grad_norm']:.3g}, × {record['clip_factor']:.3g}"),
        ("E", f"{evaluation['sequences']} sequences, {evaluation['tokens']} tokens"),
        ("mean entropy of E", f"{evaluation['mean_entropy']:.5f}"),
        ("U", f"{update['responses']} responses, mean reward {update['mean_reward']:.3f}"),
        ("predicted (forward mode)", _estimate(record["predicted"])),
        ("predicted, legacy X̄·Ȳ", f"{record['predicted_legacy']:+.4g}"),
        ("predicted, reward to go", _estimate(record["predicted_reward_to_go"])),
        ("predicted, score function", _estimate(record["predicted_score_function"])),
        ("covariance −η·Cov(log π, A)", f"{record['covariance_estimate']:+.4g}"),
        ("share of U's responses", f"{sum(shares['responses']):+.4g}"),
        ("share of momentum", f"{shares['momentum']:+.4g}"),
        ("share of weight decay", f"{shares['decay']:+.4g}"),
        ("raises entropy most", f"response {highest}: {shares['responses'][highest]:+.4g}"),
        ("lowers entropy most", f"response {lowest}: {shares['responses'][lowest]:+.4g}"),
        ("log-log slope, measured over η", "—" if slope is None else f"{slope:.4f}"),
    ]


def _estimate(estimate: dict[str, Any]) -> str:
    return _with_error(estimate["value"], Estimate(**estimate).half)


def _with_error(value: float, half: float) -> str:
    return f"{value:+.3g} ± {half:.1g}"


def page(record: dict[str, Any]) -> str:
    """Both pictures and both tables."""
    about = (
        "Nats per token of E, ± half of the 95 % interval (jackknife over prompts, Student's t); positive = entropy "
        "rises. That of predicted − measured is that of the difference: on the same E both share most of their noise."
    )
    return html_page(
        f"What the next update of {record['checkpoint']} does to entropy",
        f"<p>{escape(about)}</p>",
        identity_picture(record),
        sweep_picture(record),
        html_table(SWEEP_HEAD, sweep_rows(record)),
        html_table(("the update at η = lr", ""), summary_rows(record)),
    )
