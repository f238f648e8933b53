"""Tables and picture of docs/validity.md, from the results of `benchmarks.validity`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks._pages import between_marks
from gradtrace.instruments.verify.trial import FREE
from gradtrace.instruments.verify.verification import INFLUENCE, INFLUENCE_OWN

MODELS = {"demo": "The demo", "smollm2": "SmolLM2-135M on countdown"}
QUESTIONS = {
    "batch": "the mini-batch's objective",
    "own": "its own prompt's objective",
    "done": "what the step did to it",
}


def write_page(docs: Path, found: dict[str, Any]) -> None:
    """Replace what stands between the marks of docs/validity.md."""
    text = "\n".join(table(title, found[model]) for model, title in MODELS.items() if model in found)
    between_marks(docs / "validity.md", "validity", text)
    (docs / "images").mkdir(exist_ok=True)
    (docs / "images" / "validity.svg").write_text(picture(found))


def table(title: str, found: dict[str, Any]) -> str:
    questions, books = found["table"], found["books"]
    lines = [
        f"### {title}: {found['mini_batches']} mini-batches, {found['tokens']} tokens",
        "",
        "| score | " + " | ".join(f"{QUESTIONS[question]} | Pearson" for question in questions) + " |",
        "|---|" + "---|---|" * len(questions),
    ]
    for name in sorted(questions["batch"], key=lambda name: -questions["batch"][name]["spearman"]["median"]):
        cells = [cell(questions[question][name][kind]) for question in questions for kind in ("spearman", "pearson")]
        lines.append(f"| {name.replace('|', chr(92) + '|')} | " + " | ".join(cells) + " |")
    lines += [
        "",
        f"The books: sums of influence over {books['groups']} groups have slope {books['slope']:.3f} and Pearson's "
        f"correlation {books['pearson']:.4f} with what the step did to the groups.",
    ]
    return "\n".join([*lines, "", ""])


def cell(value: dict[str, float]) -> str:
    """ "0.981 [0.95, 0.99]"."""
    return f"{value['median']:.3f} [{value['low']:.2f}, {value['high']:.2f}]"


def picture(found: dict[str, Any]) -> str:
    """An SVG: for both models and questions the median rank correlation of each score, and its 10th and 90th
    percentile."""
    rows: list[tuple[str, dict[str, float] | None]] = []
    for model, title in MODELS.items():
        for question in ("batch", "own") if model in found else ():
            cells = found[model]["table"][question]
            rows.append((f"{title}: {QUESTIONS[question]}", None))
            order = sorted(cells, key=lambda name: -cells[name]["spearman"]["median"])
            rows += [(name, cells[name]["spearman"]) for name in order]
    width, left, top, line = 760, 250, 44, 20
    height = top + line * len(rows) + 30

    def x(value: float) -> float:
        return left + max(min(value, 1.0), -0.1) * (width - left - 90)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        '<text x="10" y="20" font-weight="bold">Does the score predict what training on a token does?</text>',
    ]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(
            f'<line x1="{x(tick):.0f}" x2="{x(tick):.0f}" y1="{top - 12}" y2="{height - 28}" stroke="#ddd"/>'
            f'<text x="{x(tick):.0f}" y="{height - 14}" text-anchor="middle" fill="#555">{tick:g}</text>'
        )
    for place, (name, value) in enumerate(rows):
        y = top + line * place
        if value is None:
            parts.append(f'<text x="10" y="{y + 4}" fill="#555">{name}</text>')
            continue
        colour = "#999" if name in FREE else "#1f6fb2" if name in (INFLUENCE, INFLUENCE_OWN) else "#c0392b"
        parts += [
            f'<text x="{left - 10}" y="{y + 4}" text-anchor="end">{name}</text>',
            f'<line x1="{x(value["low"]):.1f}" x2="{x(value["high"]):.1f}" y1="{y}" y2="{y}" stroke="{colour}"'
            ' stroke-width="3"/>',
            f'<circle cx="{x(value["median"]):.1f}" cy="{y}" r="5" fill="{colour}"/>',
            f'<text x="{width - 50}" y="{y + 4}" fill="#555">{value["median"]:.2f}</text>',
        ]
    parts.append("</svg>")
    return "\n".join(parts) + "\n"
