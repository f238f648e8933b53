r"""Are two answers the same mathematics? math-verify decides. Runs in a judge's process, under a keeper's deadline.

math-verify's own time limits are signals (SIGALRM) that a long C call never sees; they are off here, the deadline
kills.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

from gradtrace.tasks.answers import is_hedged, marked_answer
from gradtrace.tasks.verification.channel import Message
from gradtrace.tasks.verification.keeper import ForkedJudge

MEMORY = 2 << 30
"""Bytes of address space for the judge; a power tower wants all there is."""
TAIL = 2000
"""Characters of an unmarked response in which the answer is looked for, from the end."""
DEEPEST = 8
"""Brackets within brackets; math-verify's time grows exponentially with them, minutes at 20."""
CLOSE = 40
"""Characters, at the end of an unmarked response, in which words (`not`, `at least`) belong to its last number."""
NUMERAL = re.compile(r"\$? ?[-+]? ?\$? ?(?:\d[\d,]*)?(?:\.\d+)? ?%?")
PERCENT = re.compile(r"\\?%")
COMMAND = re.compile(r"\\[A-Za-z]+")
LETTER = re.compile(r"[A-Za-z]")

TEXT_IN_LATEX = re.compile(r"\\(?:text|mathrm|mbox|begin|end)\s?\{[^{}]*\}")
WORD = re.compile(r"\\?[A-Za-z]{2,}")


def create() -> ForkedJudge:
    import math_verify  # noqa: F401  imported before the fork, once for all judges of this keeper

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    parse_answer("boxed", r"\frac{1}{2}")  # builds the grammars and regular expressions
    return ForkedJudge(judge, MEMORY)


def judge(request: Message) -> Message:
    """{"score": 0 or 1} for {"response", "answer", "require"}; "unreadable" if the right answer itself is."""
    from math_verify import verify

    right = parse_reference(request["answer"])
    if not right:
        return {"failed": "unreadable"}
    kind, text = marked_answer(request["response"])
    if request["require"] not in ("any", kind):
        return {"score": 0.0}
    text = text[-TAIL:]
    if depth(text) > DEEPEST or is_hedged(text if kind != "plain" else text[-CLOSE:], request["answer"]):
        return {"score": 0.0}
    given = parse_answer(kind, PERCENT.sub("", text))
    given, possible = percents(given, right, "%" in text, "%" in request["answer"])
    equal = bool(given) and verify(possible, given, timeout_seconds=None)
    return {"score": float(equal and agrees_with_itself(text, request["answer"], possible))}


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
    return all(verify(right, parse_answer("boxed", side), timeout_seconds=None) for side in sides[:CLOSE])


def parse_reference(answer: str) -> list[Any]:
    """The right answer: `72`, LaTeX with or without dollars, or a solution that ends in `#### 72` or a box."""
    kind, text = marked_answer(answer)
    text = PERCENT.sub("", text)
    return parse_answer("boxed" if kind == "plain" and "$" not in text else kind, text)


@functools.lru_cache(maxsize=1024)  # the answers of a group are often the same, and their right one always is
def parse_answer(kind: str, text: str) -> list[Any]:
    """What math-verify reads in an answer of this kind; nobody changes the list."""
    from math_verify import parse

    if NUMERAL.fullmatch(" ".join(text.split())):
        return parse(text, parsing_timeout=None)
    # In a text math-verify looks for a number first, and of `16\sqrt{3}` it would take 16: a formula goes in a box.
    if kind == "boxed" or (kind != "plain" and is_formula(text)):
        found = parse(rf"\boxed{{{text}}}", parsing_timeout=None)
        if found or kind == "boxed":
            return found
    return parse(text, parsing_timeout=None)


def is_formula(text: str) -> bool:
    r"""No dollars and no words: `16\sqrt{3}`, `x = 5`; not `72 apples`."""
    return "$" not in text and all(word.startswith("\\") for word in WORD.findall(TEXT_IN_LATEX.sub("", text)))
