r"""Where a response has its answer: after `####`, in `\boxed{…}`, after `Answer:`, in a code block.

Imports nothing but the standard library: worker processes use it.
"""

from __future__ import annotations

import re

# An escaped brace is text, not structure.
STRUCTURE = re.compile(r"(?P<boxed>\\f?boxed\s{0,4}\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
ANSWER_LINE = re.compile(r"(?im)\banswer\W{0,4}[:=][* \t]{0,8}(\S.*)$")
FENCE = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)```", re.DOTALL)
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


def code_blocks(text: str) -> list[str]:
    """The contents of the fenced code blocks that are not empty."""
    return [content for _, content in FENCE.findall(text) if content.strip()]


def code_of(response: str) -> str:
    """The last Python block of a response, else its last block, else all of it."""
    text = response.rpartition(END_OF_THOUGHT)[2]
    blocks = [(language.lower(), content) for language, content in FENCE.findall(text) if content.strip()]
    python = [content for language, content in blocks if language in ("python", "py", "python3")]
    return (python or [content for _, content in blocks] or [text])[-1]
