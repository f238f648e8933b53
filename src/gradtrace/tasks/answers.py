r"""Where a response has its answer: after `####`, in `\boxed{…}`, in `<answer>`, after `Answer:`, in a code block.

Imports nothing but the standard library: worker processes use it. Everything here takes time in proportion to the text,
whatever a model writes: an expression that tries again from every place would take hours on ten thousand backticks.
"""

from __future__ import annotations

import re

# An escaped brace is text, not structure.
STRUCTURE = re.compile(r"(?P<boxed>\\{1,2}f?boxed\s{0,4}\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
ANSWER_LINE = re.compile(r"(?im)\banswer[^\w:=<>!]{0,4}[:=][* \t]{0,8}(\S.*)$")
FINAL_LINE = re.compile(r"(?im)\bfinal answer[^\w:=<>!]{0,4}[:=][* \t]{0,8}(\S.*)$")
VALUE = re.compile(r"\d|\$|\\[(\[A-Za-z]")
FENCE = "```"
LANGUAGE = re.compile(r"[ \t]*([\w+-]*)")
END_OF_THOUGHT = "</think>"
SPECIAL_TOKEN = re.compile(r"<[|｜][^<>|｜\n]{1,40}[|｜]>|</?s>|<(?:bos|eos|pad|(?:start|end)_of_turn)>")
"""What a tokenizer writes around a response: `<|im_end|>`, `</s>`."""
OPEN, CLOSE = "<answer>", "</answer>"

APART = 70
"""Most characters between two boxes that are one answer."""
NOTHING_BETWEEN = re.compile(r"(?:[^\w=\\]|\\(?:\W|q?quad|text|lor|land|vee|wedge|cup))*")
AND_OR = re.compile(r"(?i)\bor\b|\band\b(?!,?\s{1,4}(?:so|then|thus|hence|therefore|finally|the final)\b)")


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


def boxed_answer(text: str) -> tuple[int, str] | None:
    r"""(start, content) of the last box, or of the last boxes that are one answer: `\boxed{1}, \boxed{2}`.

    Boxes with other words between them are different answers, the last of which counts: `\boxed{1} no, \boxed{2}`.
    """
    spans = boxed_spans(text)
    if not spans:
        return None
    first = spans.pop()
    contents = [text[slice(*first)].strip()]
    while spans and _is_one_answer(text, spans[-1], first):
        first = spans.pop()
        contents.append(text[slice(*first)].strip())
    return first[0], ", ".join(dict.fromkeys(reversed(contents)))


def _is_one_answer(text: str, box: tuple[int, int], following: tuple[int, int]) -> bool:
    between = text[box[1] + 1 : following[0]]
    between = between[: between.rfind("\\")].rstrip("\\")  # without the command of the second box
    if box[1] > following[0] or len(between) > APART:
        return False
    return NOTHING_BETWEEN.fullmatch(between) is not None or AND_OR.search(between) is not None


def marked_answer(text: str) -> tuple[str, str]:
    r"""(kind, answer): what the response gives as its answer, `kind` being boxed, marker, answer, line or plain.

    The last of `\boxed{…}`, `#### …`, `<answer>…</answer>` and `Final answer: …` counts; without any of them the last
    line `Answer: …`; else the whole text. What stands before `</think>` is no answer.
    """
    text = SPECIAL_TOKEN.sub("\n", text.rpartition(END_OF_THOUGHT)[2])
    before, opened, tagged = text.rpartition(OPEN)
    if opened and (content := tagged.partition(CLOSE)[0].strip()):
        places = [(len(before), "answer", content)]
    else:  # the prompt may have opened it
        places = [(-1, "plain", text.rpartition(CLOSE)[0] or text)]
    if boxed := boxed_answer(text):
        places.append((boxed[0], "boxed", boxed[1]))
    before, marker, after = text.rpartition("####")
    if marker:
        places.append((len(before), "marker", after.partition(CLOSE)[0].strip().partition("\n")[0]))
    places += [(line.start(), "line", line[1]) for line in FINAL_LINE.finditer(text) if VALUE.search(line[1])]
    _, kind, answer = max(places)
    if kind in ("plain", "answer") and (lines := ANSWER_LINE.findall(answer)):
        return "line", lines[-1].strip()
    return kind, answer.strip()


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
