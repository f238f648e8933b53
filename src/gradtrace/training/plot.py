"""A curve made of characters."""

from __future__ import annotations

import itertools

EIGHTHS = " ▁▂▃▄▅▆▇█"


def draw_curve(values: list[float], width: int, height: int = 8) -> list[str]:
    """Lines of a bar plot with its scale on the left, from the values in order; each bar a mean where they crowd."""
    low, high = min(values), max(values)
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0  # shares look alike from run to run
    span = (high - low) or 1.0
    columns = _resample(values, max(1, min(width - 8, 2 * len(values))))
    levels = [round((value - low) / span * height * 8) for value in columns]
    lines = []
    for row in reversed(range(height)):
        label = f"{low + span * (row + 1) / height:6.2f} " if row % 2 else " " * 7
        cells = "".join(EIGHTHS[max(0, min(8, level - 8 * row))] for level in levels)
        lines.append(f"{label}│{cells}")
    return lines


def _resample(values: list[float], count: int) -> list[float]:
    """`count` values: means of neighbours, or repeats."""
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    parts = [values[a : max(b, a + 1)] for a, b in itertools.pairwise(edges)]
    return [sum(part) / len(part) for part in parts if part]
