r"""Where a response has its answer: after `####`, in `\boxed{…}`, after `Answer:`, in a code block.

Imports nothing but the standard library: worker processes use it. Everything here takes time in proportion to the text,
whatever a model writes: an expression that tries again from every place would take hours on ten thousand backticks.
"""

from __future__ import annotations

import re

# An escaped brace is text, not structure.
STRUCTURE = re.compile(r"(?P<boxed>\\f?boxed\s{0,4}\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
ANSWER_LINE = re.compile(r"(?im)\banswer\W{0,4}[:=][* \t]{0,8}(\S.*)$")
FENCE = "```"
LANGUAGE = re.compile(r"[ \t]*([\w+-]*)")
HEDGE = re.compile(
    r"""(?ix)
    (?: \b(?:not|never|neither|nor|between|over|under|above|below)\b | n't\b ) [^\d\n]{0,12} \d
    | \bat\s{1,4}(?:least|most)\b | \b(?:more|less|greater|larger|smaller|fewer|higher|lower)\s{1,4}than\b
    | [<>≤≥≠±] | \\(?:not|neq?|[gl]eq?|[gl]eqslant|[gl]t|pm|mp)(?![a-z])
    | \d\s{0,4}(?:to|through|or|–|—|~|\.\.)\s{0,4}\$?\d
    """
)
"""What makes of `18` another answer, or more than one: `not 18`, `at least 18`, `\\ge 18`, `17 to 18`, `17 or 18`."""
END_OF_THOUGHT = "</think>"


def boxed_spans(text: str) -> list[tuple[int, int]]:
    r"""(start, end) of the contents of each `\boxed{…}`, braces balanced; one that is never closed is left out.

    One pass, so that a response of ten thousand open braces costs no more than any other.
    """
    spans = []
    opened: list[int | None] = []
    for match in STRUCTURE.finditer(text):
        if match["boxed"]:
            opened.append(match.end())
        elif match["open"]:
            opened.append(None)
        elif match["close"] and opened and (start := opened.pop()) is not None:
            spans.append((start, match.start()))
    return sorted(spans)


def marked_answer(text: str) -> tuple[str, str]:
    r"""(kind, answer): what the response gives as its answer, `kind` being boxed, marker, line or plain.

    The last of `\boxed{…}` and `#### …` counts; without either the last line `Answer: …`; else the whole text.
    What stands before `</think>` is no answer.
    """
    text = text.rpartition(END_OF_THOUGHT)[2]
    boxed = boxed_spans(text)
    before_marker, marker, after_marker = text.rpartition("####")
    if boxed and (not marker or boxed[-1][0] > len(before_marker)):
        return "boxed", text[slice(*boxed[-1])].strip()
    if marker:
        return "marker", after_marker.strip().partition("\n")[0].strip()
    lines = ANSWER_LINE.findall(text)
    return ("line", lines[-1].strip()) if lines else ("plain", text.strip())


def is_hedged(text: str, right: str) -> bool:
    """Does the answer deny, bound or leave open what it names, where the right answer does nothing of the kind?"""
    return HEDGE.search(text) is not None and HEDGE.search(right) is None


def fenced(text: str) -> list[tuple[str, str]]:
    """(language, content) of the fenced code blocks that are closed and not empty."""
    found = []
    start = text.find(FENCE)
    while start >= 0:
        line_end = text.find("\n", start)
        end = text.find(FENCE, line_end + 1) if line_end >= 0 else -1
        if end < 0:
            break
        language = LANGUAGE.match(text, start + len(FENCE), line_end)
        content = text[line_end + 1 : end]
        if content.strip():
            found.append((language[1].lower() if language else "", content))
        start = text.find(FENCE, end + len(FENCE))
    return found


def code_of(response: str) -> str:
    """The last Python block of a response, else its last block, else all of it."""
    text = response.rpartition(END_OF_THOUGHT)[2]
    blocks = fenced(text)
    python = [content for language, content in blocks if language in ("python", "py", "python3")]
    return (python or [content for _, content in blocks] or [text])[-1]
