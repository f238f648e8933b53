r"""Are two answers the same mathematics? math-verify decides. Runs in a judge's process, under a keeper's deadline.

math-verify's own time limits are signals (SIGALRM) that a long C call never sees; they are off here, the deadline
kills.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from gradtrace.tasks.answers import marked_answer
from gradtrace.tasks.verification.channel import Message
from gradtrace.tasks.verification.pool import ForkedJudge
from gradtrace.tasks.verification.reading import decimal_comma, is_percentage, read, read_reference, read_response

MEMORY = 2 << 30
"""Bytes of address space for the judge; a power tower wants all there is."""
TAIL = 2000
"""Characters in which the answer is looked for: of an unmarked response the last ones."""
DEEPEST = 8
"""Brackets within brackets; math-verify's time grows exponentially with them, minutes at 20."""
MOST_SIDES = 40
"""Sides of an equation of which each is compared with the right answer."""
COMMAND = re.compile(r"\\[A-Za-z]+")
LETTER = re.compile(r"[A-Za-z]")


def create() -> ForkedJudge:
    import math_verify  # noqa: F401  imported before the fork, once for all judges of this keeper

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    read("boxed", r"\frac{1}{2}")  # builds the grammars and regular expressions
    return ForkedJudge(judge, MEMORY)


def judge(request: Message) -> Message:
    """{"score": 0 or 1} for {"response", "answer", "require"}; "unreadable" if the right answer itself is."""
    from math_verify import verify

    right_kind, right_text, right = read_reference(request["answer"])
    if not right:
        return {"failed": "unreadable"}
    kind, text = marked_answer(request["response"])
    if request["require"] not in ("any", kind):
        return {"score": 0.0}
    if text == right_text:
        return {"score": 1.0}
    text = text[-TAIL:] if kind == "plain" else text[:TAIL]
    if depth(text) > DEEPEST:
        return {"score": 0.0}
    kind, text, given = read_response(kind, text)
    if "boxed" not in (kind, right_kind):
        given, right = [*given, *decimal_comma(text)], [*right, *decimal_comma(right_text)]
    given, possible = percents(given, right, is_percentage(text), is_percentage(right_text))
    equal = bool(given) and verify(possible, given, timeout_seconds=None)
    return {"score": float(equal and agrees_with_itself(text, right_text, possible))}


def depth(text: str) -> int:
    """How deep brackets are nested, closed or not."""
    deepest = now = 0
    for character in text:
        now = now + 1 if character in "({[" else max(0, now - 1) if character in ")}]" else now
        deepest = max(deepest, now)
    return deepest


def percents(given: list[Any], right: list[Any], in_given: bool, in_right: bool) -> tuple[list[Any], list[Any]]:
    """Both answers, read without their percent signs, where one of them has such a sign and the other has not.

    18% is 18, and 0.18 where the right answer is a share (at most 1): one of the two, never both. A right answer of 18%
    may be given as 18 and as 0.18.
    """
    from sympy import Number

    if in_given == in_right or not given or not isinstance(right[0], Number):
        return given, right
    if in_right:
        return given, [*right, right[0] / 100]
    if abs(right[0]) <= 1 and isinstance(given[0], Number):
        return [given[0] / 100], right
    return given, right


def agrees_with_itself(text: str, answer: str, right: list[Any]) -> bool:
    """Of an equation such as `9 + 9 = 18` every side that is a number must be right: `19 = 18` is no 18."""
    from math_verify import verify

    if "=" in answer or "," in text or "=" not in text:
        return True
    sides = [side for side in text.split("=") if side.strip() and not LETTER.search(COMMAND.sub("", side))]
    return all(verify(right, read("boxed", side), timeout_seconds=None) for side in sides[:MOST_SIDES])
