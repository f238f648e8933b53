r"""Is the answer given in the form that was asked for? 1 or 0, whatever the answer is.

Meant as a small extra beside the reward for being right: `reward.extra={think_format: 0.1}`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gradtrace.tasks.answers import boxed_spans, fenced
from gradtrace.tasks.rewards.registry import register_reward

if TYPE_CHECKING:
    from gradtrace.tasks.base import Item

THINK = re.compile(r"\s*<think>(?P<thought>.*?)</think>(?P<answer>.*)", re.DOTALL)
MARKER = re.compile(r"####[ \t]*\S")
TAGS = ("<think>", "</think>")


@register_reward("think_format")
def think_format(response: str, item: Item) -> float:
    """`<think>…</think>` once, with something in it, at the start, and an answer after it."""
    match = THINK.fullmatch(response)
    once = all(response.count(tag) == 1 for tag in TAGS)
    return float(bool(match and once and match["thought"].strip() and match["answer"].strip()))


@register_reward("answer_format")
def answer_format(response: str, item: Item) -> float:
    """The response ends with exactly one `<answer>…</answer>` that is not empty."""
    once = response.count("<answer>") == response.count("</answer>") == 1
    content, closed, rest = response.partition("<answer>")[2].partition("</answer>")
    return float(once and bool(closed and content.strip()) and not rest.strip())


@register_reward("boxed_format")
def boxed_format(response: str, item: Item) -> float:
    r"""Exactly one `\boxed{…}` with something in it."""
    spans = boxed_spans(response)
    return float(len(spans) == 1 and bool(response[slice(*spans[0])].strip()))


@register_reward("marker_format")
def marker_format(response: str, item: Item) -> float:
    """Exactly one `#### answer`, on the last line."""
    lines = response.strip().splitlines()
    return float(bool(lines) and response.count("####") == 1 and MARKER.search(lines[-1]) is not None)


@register_reward("code_format")
def code_format(response: str, item: Item) -> float:
    """Exactly one fenced code block, closed, with something in it."""
    return float(len(fenced(response)) == 1 and response.count("```") == 2)
