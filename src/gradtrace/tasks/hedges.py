r"""Which number a sentence names as its answer, and whether it names more than one, bounds it or denies it.

Imports nothing but the standard library, and takes time in proportion to the text, as `answers` does.
"""

from __future__ import annotations

import re

NUMBER = re.compile(r"(?:(?<![\w.)}])-)?[$€£]?(?:[1-9]\d{0,2}(?:[ ,]\d{3}(?!\d))+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)")
"""A comma or a space groups thousands only before exactly three digits: `1,234` is one number, `12,34` two."""
ITEM = re.compile(
    rf"""(?x)
    (?: \$ (?: \\{{1,2}}[A-Za-z]+(?![A-Za-z]) | \\[^A-Za-z] | [A-Za-z](?![A-Za-z]) | [^$\\\nA-Za-z] )+ \$ )
    | -?\d* \\(?:[dtc]?frac|sqrt) (?:\s?\{{[^{{}}]{{0,40}}\}}){{1,2}}
    | (?:{NUMBER.pattern}) (?:/\d+)?
    """
)
"""A number, a fraction, or a formula without words in dollars."""
TEXT_COMMAND = re.compile(r"\\{1,2}(?:text\w{0,2}|mathrm|mbox)\s?\{([^{}]*)\}")
SEPARATOR = re.compile(
    r"(?i)[\s,;.&|?!$–—~]|\*\*|\\(?:[,;!()\[\]]|(?:q?quad|lor|land|vee|wedge|cup|mid|to|(?:right)?arrow)(?![a-z]))"
    r"|\b(?:and|or|to|through)\b"
)
ALTERNATIVE = re.compile(
    r"""(?ix)
    \b(?: or(?!\s{1,4}(?:more|less|fewer|so)\b) | maybe | perhaps | possibly | probably | alternatively | otherwise
    | unless | either | else | instead | (?:might|could|may)\s{1,4}(?:also\s{1,4}|well\s{1,4})?be )\b
    """
)
VAGUE = re.compile(
    r"(?i)\b(?:not|never|neither|nor|either|maybe|perhaps|possibly|probably|might|could|alternatively|otherwise|unless"
    r"|else|instead|least|most|more|less|fewer|between|over|under|above|below)\b"
)
r"""Words that make a formula a sentence about it: `\text{at least } 18`."""
FARTHEST, MOST_WORDS = 80, 10
"""Characters and words between two numbers of which one is the alternative to the other."""
SIGN = r"[<>≤≥≠] | \\(?:neq?|[gl]eq?|[gl]eqslant|[gl]t)(?![a-z])"
BEFORE = re.compile(
    rf"""(?ix)
    (?: \b(?: not | never | neither | nor | between | over | under | above | below | at\s{{1,4}}(?:least|most)
        | up\s{{1,4}}to | (?:more|less|greater|larger|smaller|fewer|higher|lower)\s{{1,4}}than )\b | n't\b )
        [^\d\n]{{0,12}} $
    | (?: {SIGN} | [<>!]= | ± | \\(?:not|pm|mp)(?![a-z]) ) [\s$({{]{{0,4}} $
    """
)
AFTER = re.compile(
    rf"""(?ix) [\s,.)$]{{0,4}}
    (?: (?:or|and)\s{{1,4}}(?:more|less|fewer|above|below|over|under|up|higher|lower|not)\b
    | at\s{{1,4}}(?:least|most)\b | (?:is|was)(?:\s{{1,4}}(?:not|wrong|false|incorrect)\b|n't\b)
    | {SIGN} | \+(?!\s{{0,4}}[\d\\(]) | /\s{{0,4}}\d )
    """
)
r"""What makes of `18` another answer: `not 18`, `at least 18`, `\ge 18`, `18 or more`, `18 < x`."""


def named(text: str, kind: re.Pattern[str] = ITEM, last: bool = True) -> list[str] | None:
    """The numbers that a text names last, or first, as its answer. None if it denies or bounds them.

    >>> named("In 3 days it is 17, maybe 16, or 18 apples.")
    ['17', '16', '18']
    """
    runs = _runs(text, kind)
    if not runs:
        return []
    run = runs[-1 if last else 0]
    start, end = run[0].start(), run[-1].end()
    if BEFORE.search(text[max(0, start - 40) : start]) or AFTER.match(text[end : end + 40]):
        return None
    return list(dict.fromkeys(item[0].strip("$") for item in run))


def _runs(text: str, kind: re.Pattern[str]) -> list[list[re.Match[str]]]:
    """The numbers and short formulas of a text, those together that are alternatives or elements of one list."""
    runs: list[list[re.Match[str]]] = []
    for item in kind.finditer(text):
        if runs and _belong_together(text[runs[-1][-1].end() : item.start()]):
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs


def _belong_together(gap: str) -> bool:
    if not gap or len(gap) > FARTHEST:
        return False
    gap = TEXT_COMMAND.sub(r" \1 ", gap)
    if not SEPARATOR.sub("", gap):
        return True
    return ALTERNATIVE.search(gap) is not None and len(gap.split()) <= MOST_WORDS


DISPLAYED = re.compile(r"\$\$.{0,400}?\$\$|\\\[.{0,400}?\\\]", re.DOTALL)
END_OF_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[^\s\d])|\n+")
VALUE = re.compile(r"\d|\$|\\[(\[A-Za-z]")
STATED = re.compile(r"(?i)\banswer\b[^\n]{0,60}?(?:\bis\b|[:=])")


def statement(text: str) -> str:
    """The sentence of a text that names its answer: the last `the answer is …`, else the last with a number or formula.

    A sentence beside it that offers an alternative belongs to it: `It is 17. Or maybe 18.`
    """
    text = DISPLAYED.sub(lambda display: display[0].replace("\n", " "), text)
    sentences = [sentence for sentence in END_OF_SENTENCE.split(text) if VALUE.search(sentence)]
    if not sentences:
        return text
    stated = [place for place, sentence in enumerate(sentences) if STATED.search(sentence)]
    first = last = stated[-1] if stated else len(sentences) - 1
    while last + 1 < len(sentences) and ALTERNATIVE.search(sentences[last + 1]):
        last += 1
    if first and ALTERNATIVE.search(sentences[first]):
        first -= 1
    return " ".join(sentences[first : last + 1])
