"""Answers that are plain numbers, found by a rule and compared as such. For anything else: `math`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gradtrace.tasks.answers import is_hedged
from gradtrace.tasks.rewards.registry import register_reward

if TYPE_CHECKING:
    from gradtrace.tasks.base import Item

NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")


@register_reward("gsm8k")
def gsm8k(response: str, item: Item) -> float:
    """1 if the last number after `####` in the response equals the one in the answer."""
    return float(number_after_marker(response) == number_after_marker(str(item["answer"])) is not None)


@register_reward("last_number")
def last_number(response: str, item: Item) -> float:
    r"""1 if the number in the last \boxed{…}, else after the last `Answer:`, equals the answer's."""
    found = re.findall(r"\\boxed\{([^{}]*)\}", response) or re.findall(r"(?i)answer:\s*(.*)", response)
    expected = as_number(str(item["answer"]))
    return float(bool(found) and as_number(found[-1]) == expected is not None)


def number_after_marker(text: str) -> float | None:
    """The number in the line after the last `####`, or of the whole text if that is nothing but a number."""
    _, marker, tail = text.rpartition("####")
    if not marker and not NUMBER.fullmatch(text.strip()):
        return None
    return as_number(tail.strip().partition("\n")[0])


def as_number(text: str) -> float | None:
    """The first number in the text, thousands separators and a currency sign removed.

    None if the text denies or bounds it (`not 18`), or is an equation between numbers.
    """
    found = NUMBER.findall(text)
    if not found or is_hedged(text, "") or (len(found) > 1 and "=" in text):
        return None
    return float(re.sub(r"[,$]", "", found[0]))
