r"""What math-verify reads in an answer: a formula as a whole, or the number that a sentence names.

math-verify searches: where it cannot read `17 \lor 18` as a formula, it takes the last number, 18. So a formula is
read by its LaTeX parser alone, and one that this cannot read is compared as text.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from gradtrace.tasks.answers import marked_answer
from gradtrace.tasks.hedges import VAGUE, named, statement

NUMERAL = re.compile(
    r"[$€£]?\s?[-+]?\s?[$€£]?\s?(?:[1-9][0-9]{0,2}(?:[ ,][0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?\s?[$€£°]?\.?"
)
DECIMAL_COMMA = re.compile(r"(?:^|(?<=[\s:=€£]))-?(?![1-9]\d{0,2},\d{3}(?!\d))\d+,\d+(?=[\s$€£%]|\.?$|\.\D)")
PERCENT = re.compile(r"(?i)\\?%|\s?\b(?:percent(?:age)?|pct)\b")
POINT = re.compile(r"(?<!\\right)\.$")
TEXT = r"\\{1,2}(?:text(?:bf|it|rm|normal)?|math(?:rm|it|bf)|mbox)\s?"
TEXT_IN_LATEX = re.compile(TEXT + r"\{[^{}]*\}|\\(?:begin|end)\s?\{[^{}]*\}")
WORD = re.compile(r"\\?[A-Za-z]{2,}")
CONNECTIVE = re.compile(r"\\{1,2}(?:lor|vee|land|wedge)(?![a-z])|,?\s*" + TEXT + r"\{\s*,?\s*(?:and|or)\s*,?\s*\}")
THOUSANDS = re.compile(r"(?:^|=)\s{0,4}-?[1-9]\d{0,2}(?:,\d{3})+(?![,\d])")
UNIT = re.compile(TEXT + r"\{")
LETTER_IN_TEXT = re.compile(TEXT + r"\{([A-Za-z])\}")
POWER_OF_UNIT = re.compile(r"\^\{?\d\}?$")
ABOUT = re.compile(r"^\s*\\approx(?![a-z])")
DIGIT, NOT_DIGITS = re.compile(r"\d"), re.compile(r"[^\d.-]")
RELATIONS = {"!=": r"\neq ", "≠": r"\neq ", ">=": r"\ge ", "≥": r"\ge ", "<=": r"\le ", "≤": r"\le ", "≈": r"\approx "}


def read_reference(answer: str) -> tuple[str, str, list[Any]]:
    """(kind, text, reading) of the right answer: `72`, LaTeX, or a solution that ends in `#### 72` or a box."""
    kind, text = as_formula(*marked_answer(answer))
    return kind, text, read("boxed" if kind == "plain" and "$" not in text else kind, text)


def read_response(kind: str, text: str) -> tuple[str, str, list[Any]]:
    """(kind, text, reading) of an answer that a response marks, the text without the sentences around it."""
    kind, text = as_formula(kind, text)
    if kind != "boxed" and not is_formula(text):
        kind, text = as_formula(kind, statement(text))
    return kind, text, read(kind, text)


@functools.lru_cache(maxsize=1024)  # the answers of a group are often the same, and their right one always is
def read(kind: str, text: str) -> list[Any]:
    """What an answer of this kind says, without its percent signs; nobody changes the list."""
    text = POINT.sub("", PERCENT.sub("", text).strip(" \n*"))
    if DIGIT.search(text) and NUMERAL.fullmatch(text):
        return [number(NOT_DIGITS.sub("", text.rstrip(".")))]
    if kind == "boxed" or is_formula(text):
        return read_formula(text)
    return read_statement(text)


def as_formula(kind: str, text: str) -> tuple[str, str]:
    """The answer with relations as LaTeX writes them; one that is a single formula in dollars is as good as boxed."""
    for written, latex in RELATIONS.items():
        text = text.replace(written, latex)
    inner = text.strip("$ .")
    alone = text.startswith("$") and text.endswith(("$", "$.")) and "$" not in inner
    return ("boxed", inner) if alone else (kind, text)


def number(text: str) -> Any:
    from sympy import Float, Integer

    return Float(text) if "." in text else Integer(int(text))


def is_percentage(text: str) -> bool:
    """Is the last number of a text a percentage?"""
    signs = list(PERCENT.finditer(text))
    return bool(signs) and DIGIT.search(text, signs[-1].end()) is None


def read_formula(text: str) -> list[Any]:
    r"""What a formula says as a whole; where math-verify would leave a part of it out, the formula as it is written.

    Of `1/3 \approx 0.33` the exact side alone counts.
    """
    from math_verify import LatexExtractionConfig, parse

    text = THOUSANDS.sub(lambda number: number[0].replace(",", ""), CONNECTIVE.sub(",", ABOUT.sub("", text)))
    if loses_a_part(text):
        text = LETTER_IN_TEXT.sub(r"\1", text)
    if VAGUE.search(text) or loses_a_part(text):
        return ["".join(text.split())]
    return parse(rf"\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=None)


def loses_a_part(text: str) -> bool:
    r"""Would math-verify, which drops all from `\text{` to a brace at the end as a unit, drop more than a unit?"""
    unit = UNIT.search(text)
    if unit is None or not text[: unit.start()].strip():
        return False
    dropped = POWER_OF_UNIT.sub("", text[unit.start() :].strip())
    more = DIGIT.search(dropped) is not None or bool(TEXT_IN_LATEX.sub("", dropped).strip(" .,;"))
    return dropped.endswith("}") and more


def read_statement(text: str) -> list[Any]:
    """The number or formula that a sentence names, or all of several; nothing, if it denies or bounds them."""
    from math_verify import parse
    from sympy import MatrixBase, MatrixExpr, Set, Tuple

    numbers = named(text)
    if numbers is None:
        return []
    if len(numbers) == 1 and f"${numbers[0]}$" in text:
        return read_formula(numbers[0])
    found = parse(text, parsing_timeout=None)
    if (
        len(numbers) > 1
        and "\\begin" not in text
        and not (found and isinstance(found[0], (Set, Tuple, MatrixBase, MatrixExpr)))
    ):
        return read_formula(", ".join(numbers))
    return found


def decimal_comma(text: str) -> list[Any]:
    """The number that `1000,99` is, if its comma is a decimal one: outside of LaTeX it may be."""
    found = DECIMAL_COMMA.search(text)
    return [number(found[0].replace(",", "."))] if found else []


def is_formula(text: str) -> bool:
    r"""No dollars and no words but `and` and `or`: `16\sqrt{3}`, `x = 5`; not `72 apples`."""
    words = WORD.findall(TEXT_IN_LATEX.sub("", text))
    return "$" not in text and all(word.startswith("\\") or word.lower() in ("and", "or") for word in words)
