"""The deletion test's table and picture in docs/validity.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks._pages import between_marks

COLOURS = {"all tokens": "#555", "score > 0": "#1f6fb2", "score ≤ 0": "#c0392b"}


def write_deletion(docs: Path, found: dict[str, dict[str, Any]]) -> None:
    """Replace what stands between the marks."""
    between_marks(docs / "validity.md", "deletion", "\n".join(map(table, found, found.values())))
    (docs / "images").mkdir(exist_ok=True)
    (docs / "images" / "deletion.svg").write_text(picture(found))


def table(task: str, rows: dict[str, Any]) -> str:
    seeds = max((row["accuracy"].count for row in rows.values()), default=0)
    lines = [
        f"### Reward for the {task}, {seeds} seeds",
        "",
        "| trained on | share of the tokens | held-out accuracy | minus all tokens |",
        "|---|---|---|---|",
    ]
    for rule, row in rows.items():
        label = rule.replace("|", "\\|")
        lines.append(f"| {label} | {row['share']:.0%} | {row['accuracy']} | {row['difference']} |")
    return "\n".join([*lines, "", ""])


def picture(found: dict[str, dict[str, Any]]) -> str:
    """An SVG: a bar with an interval for every rule, one panel for each task."""
    width, left, line, top = 860, 180, 24, 46
    panel = (width - left) // max(len(found), 1)
    count = max((len(rows) for rows in found.values()), default=0)
    height = top + line * count + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"',
        ' font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        '<text x="10" y="18" font-weight="bold">Held-out accuracy when training leaves tokens out</text>',
    ]
    for place, (task, rows) in enumerate(found.items()):
        x0, scale = left + place * panel, panel - 70
        parts.append(f'<text x="{x0}" y="38" fill="#555">reward for the {task}</text>')
        for number, (rule, row) in enumerate(rows.items()):
            y, value = top + number * line, row["accuracy"]
            if place == 0:
                label = rule.replace("<", "&lt;").replace(">", "&gt;")
                parts.append(f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{label}</text>')
            colour = COLOURS.get(rule, "#aaa")
            parts += [
                f'<rect x="{x0}" y="{y}" width="{max(value.mean, 0.003) * scale:.1f}" height="16" fill="{colour}"/>',
                f'<line x1="{x0 + value.low * scale:.1f}" x2="{x0 + value.high * scale:.1f}" y1="{y + 8}" y2="{y + 8}"'
                ' stroke="#000"/>',
                f'<text x="{x0 + value.high * scale + 6:.1f}" y="{y + 13}" fill="#333">{value.mean:.2f}</text>',
            ]
    return "\n".join([*parts, "</svg>"]) + "\n"
