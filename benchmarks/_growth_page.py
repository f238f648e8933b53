"""The table and the picture of growth on docs/scaling.md."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from benchmarks._pages import between_marks

LABELS = {
    "tokens": "tokens per response",
    "groups": "responses",
    "layers": "layers",
    "width": "weights of a layer",
}
COLOURS = {"tokens": "#0072b2", "groups": "#d55e00", "layers": "#009e73", "width": "#cc79a7"}


def write_page(docs: Path, detail: dict[str, Any], ratios: dict[str, float]) -> None:
    between_marks(docs / "scaling.md", "growth", table(detail, ratios))
    (docs / "images" / "growth.svg").write_text(picture(detail))


def table(detail: dict[str, Any], ratios: dict[str, float]) -> str:
    lines = [
        "| what grows | sizes | operations of the trace: slope | share of the pass | "
        "peak memory with ÷ without, at most |",
        "|---|---|---|---|---|",
    ]
    for name, rows in detail.items():
        share = rows[-1]["added_flops"] / rows[-1]["plain_flops"]
        sizes = f"× {rows[-1]['size'] / rows[0]['size']:.0f}"
        lines.append(
            f"| {LABELS[name]} | {sizes} | {ratios[f'growth_flops_{name}']:.2f} | {100 * share:.0f} % | "
            f"{ratios[f'peak_memory_{name}']:.2f} |"
        )
    return "\n".join(lines)


def picture(detail: dict[str, Any]) -> str:
    """Operations that the trace adds, relative to the smallest size, on logarithmic axes; grey is proportion."""
    width, height, left, bottom = 620, 330, 60, 280
    most = max(math.log2(row["size"] / rows[0]["size"]) for rows in detail.values() for row in rows)

    def place(size: float, value: float) -> tuple[float, float]:
        return left + math.log2(size) / most * 330, bottom - math.log2(value) / most * 240

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="{width}" height="{height}" fill="white"/>',
        f'<line x1="{left}" y1="{bottom}" x2="{left + 330}" y2="{bottom - 240}" stroke="#999" stroke-width="6" '
        'opacity="0.35"/>',
    ]
    for power in range(int(most) + 1):
        x, y = place(2**power, 2**power)
        parts.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="middle" fill="#444">×{2**power}</text>')
        parts.append(f'<text x="{left - 10}" y="{y + 4}" text-anchor="end" fill="#444">×{2**power}</text>')
    for index, (name, rows) in enumerate(detail.items()):
        points = [
            place(row["size"] / rows[0]["size"], max(row["added_flops"] / rows[0]["added_flops"], 1.0)) for row in rows
        ]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{COLOURS[name]}"/>' for x, y in points]
        parts.append(f'<text x="430" y="{60 + 22 * index}" fill="{COLOURS[name]}">{LABELS[name]}</text>')
    parts.append('<text x="430" y="160" fill="#777">grey: in proportion</text>')
    parts.append(f'<text x="{left}" y="{height - 10}" fill="#222">size; upwards: operations the trace adds</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
