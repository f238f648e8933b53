"""Answers that are a calculation: it is computed here, not by the model."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gradtrace.tasks.countdown import NotAnExpressionError, compute, last_expression
from gradtrace.tasks.rewards.numbers import number_after_marker
from gradtrace.tasks.rewards.registry import register_reward

if TYPE_CHECKING:
    from gradtrace.tasks.base import Item

TIMES = re.compile(r"(?<=[\d)])\s*[xX]\s*(?=[\d(])")


@register_reward("gsm8k_calculation")
def gsm8k_calculation(response: str, item: Item) -> float:
    """1 if the last calculation in the response, such as `12 + 3`, comes to the answer when it is computed exactly.

    Whatever the response claims that it comes to is not looked at: models that choose the right numbers and the right
    operator are often too small to compute. `$3 x 4` is `3 * 4`.
    """
    calculation = last_expression(TIMES.sub("*", response.replace("$", "")))
    if calculation is None:
        return 0.0
    try:
        return float(float(compute(calculation)) == number_after_marker(str(item["answer"])))
    except NotAnExpressionError:
        return 0.0
