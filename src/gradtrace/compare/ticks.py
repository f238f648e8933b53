"""Round numbers for the axes of a picture, and how they are written."""

from __future__ import annotations

import math

STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


def ticks_between(low: float, high: float, count: int) -> list[float]:
    """Round numbers, about `count` of them, the first at or below `low`, the last at or above `high`."""
    if not high > low:
        spread = abs(low) / 2 or 1.0
        low, high = low - spread, high + spread
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor for factor in STEPS if factor * power >= rough * 0.999) * power
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
        decimals = next(
            (d for d in range(7) if abs(step * 10**d - round(step * 10**d)) < 1e-6 * 10**d * step), 6
        )
        text = f"{value:,.{decimals}f}"
    return text.replace("-", "\u2212")
