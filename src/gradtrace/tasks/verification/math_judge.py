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
    if kind == "boxed":
        return parse(rf"\boxed{{{text}}}", parsing_timeout=None)
    # Words around a number, or LaTeX between dollars; then LaTeX without dollars.
    return parse(text, parsing_timeout=None) or parse(f"${text}$", parsing_timeout=None)
