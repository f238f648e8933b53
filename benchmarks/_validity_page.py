"""Table and picture of docs/validity.md, from the results of `benchmarks.validity`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks._pages import between_marks
from gradtrace.instruments.verify import measure

ORDER = ("single_token", "half_tokens", "single_response", "batch_tokens", "batch_responses")
KINDS = {kind: measure.KINDS[kind] for kind in ORDER}


def write_page(docs: Path, found: dict[str, Any], groups: dict[str, int]) -> None:
    """Replace what stands between the marks of docs/validity.md."""
    tables = [table("The demo", found["demo"], groups["demo"])]
    if "smollm2" in found:
        tables.append(table("SmolLM2-135M on countdown", found["smollm2"], groups["smollm2"]))
    between_marks(docs / "validity.md", "validity", "\n".join(tables))
    (docs / "images").mkdir(exist_ok=True)
    (docs / "images" / "validity.svg").write_text(picture(found["demo"]))


def table(title: str, found: dict[str, Any], groups: int) -> str:
    kinds = [kind for kind in KINDS if kind in next(iter(found["table"].values()))]
    lines = [
        f"### {title}: {groups} groups",
        "",
        "| score | " + " | ".join(KINDS[kind] for kind in kinds) + " | update with it |",
        "|---|" + "---|" * (len(kinds) + 1),
    ]
    order = sorted(found["table"], key=lambda name: -found["table"][name]["single_token"].mean)
    for name in order:
        cells = " | ".join(str(found["table"][name][kind]) for kind in kinds)
        cost = f"{found['cost'][name]:.2f}×" if name in found["cost"] else "–"
        lines.append(f"| {name.replace('|', chr(92) + '|')} | {cells} | {cost} |")
    return "\n".join([*lines, "", ""])


def picture(found: dict[str, Any]) -> str:
    """An SVG: agreement on single tokens, with its interval, against what the score costs."""
    rows = [(n, found["table"][n]["single_token"], found["cost"].get(n, 1.0)) for n in found["table"]]
    rows.sort(key=lambda row: -row[1].mean)
    width, left, top, line = 860, 330, 40, 22
    height = top + line * len(rows) + 40
    scale = (width - left - 110) / 1.0

    def x(value: float) -> float:
        return left + max(min(value, 1.0), -0.05) * scale

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{left}" y="20" font-weight="bold">Does the score predict what a real step on a token does?</text>',
    ]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(
            f'<line x1="{x(tick):.0f}" x2="{x(tick):.0f}" y1="{top - 8}" y2="{height - 32}" stroke="#ddd"/>'
            f'<text x="{x(tick):.0f}" y="{height - 16}" text-anchor="middle" fill="#555">{tick:g}</text>'
        )
    for place, (name, value, cost) in enumerate(rows):
        y = top + line * place + 8
        free = name.startswith("|A|")
        colour = "#999" if free else "#c0392b" if "inverse" in name or "position" in name else "#1f6fb2"
        price = "no gradient" if free else f"update {cost:.2f}×"
        label = name.replace("&", "&amp;").replace("<", "&lt;")
        parts += [
            f'<text x="{left - 10}" y="{y + 4}" text-anchor="end">{label}</text>',
            f'<line x1="{x(value.low):.1f}" x2="{x(value.high):.1f}" y1="{y}" y2="{y}" stroke="{colour}"'
            ' stroke-width="3"/>',
            f'<circle cx="{x(value.mean):.1f}" cy="{y}" r="5" fill="{colour}"/>',
            f'<text x="{width - 100}" y="{y + 4}" fill="#555">{price}</text>',
        ]
    parts.append(
        f'<text x="{left}" y="{height - 2}" fill="#555">Spearman on single tokens, mean over groups, 95 % interval'
        "</text></svg>"
    )
    return "\n".join(parts) + "\n"
