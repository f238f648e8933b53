"""Line pictures as SVG text, ours from top to bottom: no plotting library, no script, no font to fetch.

    from gradtrace.commands.pages.picture import Curve, line_picture

    svg = line_picture(
        [
            Curve("GRPO", steps, mean, low, high),                       # a line with a band
            Curve("TracIn", steps, other_mean, other_low, other_high),
            Curve("seed 3", steps, single),                              # a line without one
        ],
        title="Held-out accuracy, 40 % of rewards flipped",
        x_label="training steps",
        y_label="share right; band: 95 % t-interval over 5 seeds",
    )
    Path("accuracy.svg").write_text(svg, encoding="utf-8")

Curves differ in colour and in the pattern of their line, and carry their label at their end. The picture follows
the reader's light or dark setting. NaN breaks a line. `identity=True` adds the line y = x, for predicted against
measured; `Curve(..., marks=True)` draws points (with `low` and `high` as error bars) instead of a line.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 760, 420
TOP, BOTTOM, LEFT, RIGHT = 66, 46, 64, 20
FONT = '-apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", Arial, sans-serif'
LETTER = 6.3
"""Width of a letter of 12 px type, on the generous side."""
LABEL_HEIGHT = 15
LONGEST_LABEL = 38
LIGHT = ("#16181d", "#972767", "#5b4bb5", "#00695c", "#7a4a2a", "#6a5a00", "#02579e", "#984c00")
DARK = ("#e9eaec", "#e78db9", "#a89cf0", "#5fc9b4", "#d6a27c", "#d5c463", "#9cc5f4", "#f9b786")
ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)
"""Ticks are these, times a power of ten."""
DASHES = ("none", "none", "7 3", "2 2", "8 3 2 3", "1 3", "12 4", "4 4")


@dataclass(frozen=True, eq=False)
class Curve:
    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    """Lower edge of the band, one value per x."""
    high: Sequence[float] | None = None
    marks: bool = False
    """Points with error bars instead of a line with a band."""

    def __post_init__(self) -> None:
        lengths = {len(values) for values in (self.x, self.y, self.low, self.high) if values is not None}
        if len(lengths) > 1 or (self.low is None) != (self.high is None):
            raise ValueError(f"curve {self.label!r}: x, y, low and high need one length, low and high come together")


def line_picture(
    curves: Sequence[Curve],
    title: str,
    x_label: str,
    y_label: str,
    *,
    width: int = WIDTH,
    identity: bool = False,
) -> str:
    """Draw an SVG document."""
    return _Picture(curves, width, identity).draw(title, x_label, y_label)


class _Picture:
    def __init__(self, curves: Sequence[Curve], width: int, identity: bool) -> None:
        self.curves = list(curves)
        self.width, self.identity = width, identity
        longest = max((min(LONGEST_LABEL, len(curve.label)) for curve in self.curves), default=0)
        self.right = width - RIGHT - LETTER * longest
        xs = _finite(value for curve in self.curves for value in curve.x)
        ys = _finite(
            value
            for curve in self.curves
            for values in (curve.y, curve.low, curve.high)
            if values is not None
            for value in values
        )
        if identity:
            xs = ys = [*xs, *ys]
        self.x_ticks = ticks_between(min(xs, default=0.0), max(xs, default=1.0), 6)
        self.y_ticks = ticks_between(min(ys, default=0.0), max(ys, default=1.0), 5)
        (self.x_low, *_, self.x_high), (self.y_low, *_, self.y_high) = self.x_ticks, self.y_ticks

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (self.right - LEFT)

    def y(self, value: float) -> float:
        return TOP + (self.y_high - value) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)

    def draw(self, title: str, x_label: str, y_label: str) -> str:
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {HEIGHT}" width="{self.width}" '
            f'height="{HEIGHT}" role="img" class="gradtrace-picture">',
            f"<title>{escape(title)}</title>",
            f"<style>{_style()}</style>",
            f'<rect class="paper" width="{self.width}" height="{HEIGHT}"/>',
            f'<text class="title" x="{LEFT - 44}" y="26">{escape(title)}</text>',
            f'<text class="label" x="{LEFT - 44}" y="46">{escape(y_label)}</text>',
            f'<text class="label" x="{self.right:.1f}" y="{HEIGHT - 8}" text-anchor="end">{escape(x_label)}</text>',
            *self._axes(),
        ]
        if not any(_finite(curve.y) for curve in self.curves):
            parts.append(f'<text class="label" x="{LEFT + 12}" y="{TOP + 24}">no values</text>')
        if self.identity:
            parts.append(
                f'<path class="identity" d="M{self.x(self.x_low):.1f} {self.y(self.x_low):.1f}'
                f'L{self.x(self.x_high):.1f} {self.y(self.x_high):.1f}"/>'
            )
        parts += [self._band(index, curve) for index, curve in enumerate(self.curves) if not curve.marks]
        for index, curve in reversed(list(enumerate(self.curves))):  # the first curve lies on top
            parts.append(self._marks(index, curve) if curve.marks else self._line(index, curve))
        parts += self._labels()
        return "\n".join(part for part in [*parts, "</svg>"] if part) + "\n"

    def _axes(self) -> list[str]:
        parts = []
        for tick in self.y_ticks:
            y = self.y(tick)
            kind = "grid zero" if tick == 0 else "grid"
            parts.append(f'<path class="{kind}" d="M{LEFT} {y:.1f}H{self.right:.1f}"/>')
            text = escape(number_text(tick, self.y_ticks))
            parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        for tick in self.x_ticks:
            text = escape(number_text(tick, self.x_ticks))
            y = HEIGHT - BOTTOM + 17
            parts.append(f'<text class="tick" x="{self.x(tick):.1f}" y="{y}" text-anchor="middle">{text}</text>')
        return parts

    def _runs(self, curve: Curve, *columns: Sequence[float]) -> list[list[tuple[float, ...]]]:
        """Stretches of the curve without a gap: [(x, *columns)] in pixels, columns in pixels of y."""
        stretches: list[list[tuple[float, ...]]] = [[]]
        for x, *values in zip(curve.x, *columns, strict=True):
            if all(math.isfinite(value) for value in (x, *values)):
                stretches[-1].append((self.x(x), *(self.y(value) for value in values)))
            elif stretches[-1]:
                stretches.append([])
        return [stretch for stretch in stretches if stretch]

    def _band(self, index: int, curve: Curve) -> str:
        if curve.low is None or curve.high is None:
            return ""
        pieces = []
        for stretch in self._runs(curve, curve.low, curve.high):
            upper = " ".join(f"{x:.1f},{high:.1f}" for x, _, high in stretch)
            lower = " ".join(f"{x:.1f},{low:.1f}" for x, low, _ in reversed(stretch))
            pieces.append(f'<polygon class="band c{index % len(LIGHT)}" points="{upper} {lower}"/>')
        return "".join(pieces)

    def _line(self, index: int, curve: Curve) -> str:
        pieces = []
        for stretch in self._runs(curve, curve.y):
            if len(stretch) == 1:
                x, y = stretch[0]
                pieces.append(f'<circle class="mark c{index % len(LIGHT)}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>')
            else:
                path = "L".join(f"{x:.1f} {y:.1f}" for x, y in stretch)
                pieces.append(f'<path class="line c{index % len(LIGHT)}" d="M{path}"/>')
        return "".join(pieces)

    def _marks(self, index: int, curve: Curve) -> str:
        kind, pieces = f"c{index % len(LIGHT)}", []
        if curve.low is not None and curve.high is not None:
            for stretch in self._runs(curve, curve.low, curve.high):
                for x, low, high in stretch:
                    pieces.append(f'<path class="bar {kind}" d="M{x:.1f} {low:.1f}V{high:.1f}"/>')
        for stretch in self._runs(curve, curve.y):
            pieces += [f'<circle class="mark {kind}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in stretch]
        return "".join(pieces)

    def _labels(self) -> list[str]:
        """Write names at the end of each curve, pushed apart where they would lie on one another."""
        ends = []
        for index, curve in enumerate(self.curves):
            stretches = self._runs(curve, curve.y)
            if stretches:
                ends.append((stretches[-1][-1][1], index, stretches[-1][-1][0]))
        ends.sort()
        places = spread_apart([y for y, _, _ in ends], LABEL_HEIGHT, TOP, HEIGHT - BOTTOM)
        parts = []
        for place, (y, index, x) in zip(places, ends, strict=True):
            kind, label = f"c{index % len(LIGHT)}", self.curves[index].label
            short = label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 1]}…"
            left = self.right + 10
            if not self.curves[index].marks:
                parts.append(f'<path class="lead {kind}" d="M{x + 2:.1f} {y:.1f}L{left - 3:.1f} {place:.1f}"/>')
            parts.append(f'<text class="name {kind}" x="{left:.1f}" y="{place + 4:.1f}">{escape(short)}</text>')
        return parts


def ticks_between(low: float, high: float, count: int) -> list[float]:
    """Round numbers, about `count` of them, the first at or below `low`, the last at or above `high`."""
    if not high > low:
        spread = abs(low) / 2 or 1.0
        low, high = low - spread, high + spread
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor for factor in ROUND if factor * power >= rough * 0.999) * power
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def number_text(value: float, ticks: list[float]) -> str:
    """A tick, with the decimals that the ticks have in common, a real minus sign, commas in thousands."""
    if value == 0:
        return "0"
    step = abs(ticks[1] - ticks[0]) if len(ticks) > 1 else abs(value)
    largest = max(abs(tick) for tick in ticks)
    if largest < 1e-3 or largest >= 1e7:
        mantissa, exponent = f"{value:.1e}".split("e")
        text = f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    else:
        decimals = next((d for d in range(7) if abs(step * 10**d - round(step * 10**d)) < 1e-6 * 10**d * step), 6)
        text = f"{value:,.{decimals}f}"
    return text.replace("-", "\u2212")


def spread_apart(wanted: list[float], gap: float, low: float, high: float) -> list[float]:
    """Ascending places at least `gap` apart, close to the wanted ones, inside low…high while there is room."""
    down, up = list(wanted), list(wanted)
    for first, second in itertools.pairwise(range(len(wanted))):
        down[second] = max(down[second], down[first] + gap)
    for first, second in reversed(list(itertools.pairwise(range(len(wanted))))):
        up[first] = min(up[first], up[second] - gap)
    places = [(a + b) / 2 for a, b in zip(down, up, strict=True)]  # both keep the gap, and so does their mean
    places = [min(place, high - gap * later) for later, place in enumerate(reversed(places))][::-1]
    return [max(place, low + gap * earlier) for earlier, place in enumerate(places)]


def _finite(values: Iterable[float]) -> list[float]:
    return [float(value) for value in values if math.isfinite(value)]


def escape(text: str) -> str:
    """Escape a text for XML and HTML; control characters, which XML forbids, become spaces."""
    clean = "".join(character if character >= " " else " " for character in text)
    return clean.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def _style() -> str:
    """Scoped to the picture, so that several can stand in one HTML page."""
    rules = [
        f".gradtrace-picture text {{ font: 12px {FONT}; font-variant-numeric: tabular-nums; }}",
        ".gradtrace-picture .title { font-size: 15px; font-weight: 650; }",
        ".gradtrace-picture .name { font-weight: 600; }",
        ".gradtrace-picture .line { fill: none; stroke-width: 1.9; stroke-linejoin: round; }",
        ".gradtrace-picture .band { opacity: .14; stroke: none !important; }",
        ".gradtrace-picture .lead { fill: none; stroke-width: .8; opacity: .45; stroke-dasharray: none !important; }",
        ".gradtrace-picture .bar { fill: none; stroke-width: 1.3; stroke-dasharray: none !important; }",
        ".gradtrace-picture .name, .gradtrace-picture .mark { stroke: none !important; }",
        ".gradtrace-picture .identity { fill: none; stroke-width: 1; stroke-dasharray: 4 4; }",
    ]
    light = {"paper": "#fdfdfb", "ink": "#16181d", "dim": "#63686f", "grid": "#e2e2dd", "zero": "#c9c9c3"}
    dark = {"paper": "#131518", "ink": "#e9eaec", "dim": "#8a9099", "grid": "#2a2e34", "zero": "#444a52"}
    rules += _colours(light, LIGHT)
    for index, dash in enumerate(DASHES):
        rules.append(f".gradtrace-picture .line.c{index} {{ stroke-dasharray: {dash}; }}")
    return "\n".join([*rules, "@media (prefers-color-scheme: dark) {", *_colours(dark, DARK), "}"])


def _colours(page: dict[str, str], lines: tuple[str, ...]) -> list[str]:
    return [
        f".gradtrace-picture .paper {{ fill: {page['paper']}; }}",
        f".gradtrace-picture .title {{ fill: {page['ink']}; }}",
        f".gradtrace-picture :is(.label, .tick) {{ fill: {page['dim']}; }}",
        f".gradtrace-picture .grid {{ stroke: {page['grid']}; }}",
        f".gradtrace-picture .zero {{ stroke: {page['zero']}; }}",
        f".gradtrace-picture .identity {{ stroke: {page['dim']}; }}",
        *(
            f".gradtrace-picture .c{index} {{ stroke: {colour}; }} "
            f".gradtrace-picture :is(.band, .name, .mark).c{index} {{ fill: {colour}; }}"
            for index, colour in enumerate(lines)
        ),
    ]
