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
from gradtrace.tasks.verification.keeper import ForkedJudge

MEMORY = 2 << 30
"""Bytes of address space for the judge; a power tower wants all there is."""
TAIL = 2000
"""Characters of an unmarked response in which the answer is looked for, from the end."""
NUMERAL = re.compile(r"\$?\s*[-+]?\s*\$?\s*(?:\d[\d,]*)?(?:\.\d+)?\s*%?")

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
    given = parse_answer(kind, text[-TAIL:])
    return {"score": float(bool(given) and verify(right, given, timeout_seconds=None))}


def parse_reference(answer: str) -> list[Any]:
    """The right answer: `72`, LaTeX with or without dollars, or a solution that ends in `#### 72` or a box."""
    kind, text = marked_answer(answer)
    return parse_answer("boxed" if kind == "plain" and "$" not in text else kind, text)


def parse_answer(kind: str, text: str) -> list[Any]:
    from math_verify import parse

    if NUMERAL.fullmatch(text):
        return parse(text, parsing_timeout=None)
    # In a text math-verify looks for a number first, and of `16\sqrt{3}` it would take 16: a formula goes in a box.
    if kind == "boxed" or (kind != "plain" and is_formula(text)):
        found = parse(rf"\boxed{{{text}}}", parsing_timeout=None)
        if found or kind == "boxed":
            return found
    return parse(text, parsing_timeout=None)


def is_formula(text: str) -> bool:
    r"""No dollars and no words: `16\sqrt{3}`, `x = 5`; not `72 apples`."""
    return "$" not in text and all(
        word.startswith("\\") for word in WORD.findall(TEXT_IN_LATEX.sub("", text))
    )
