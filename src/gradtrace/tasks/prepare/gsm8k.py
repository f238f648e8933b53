"""GSM8K: grade-school word problems; the answer is the number after `####`."""

from __future__ import annotations

import math
import re

from gradtrace.errors import GradtraceError
from gradtrace.tasks.prepare.base import Example, Preparation, answer_of, question_of, split_of
from gradtrace.tasks.sources import Row

ANNOTATION = re.compile(r"<<.*?>>")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
FRACTION = re.compile(r"\d\s*/\s*\d|%|percent")
ANSWER = re.compile(r"(?:^|####)\s*\$?(-?[\d,]+(?:\.\d+)?)\s*$")


def example(row: Row) -> Example:
    question = question_of(row, "question", "prompt")
    solution = str(answer_of(row, "answer"))
    number = ANSWER.search(solution)
    if number is None:
        raise GradtraceError(f"an answer without `#### number` at its end: {solution[-80:]!r}.")
    columns = {"solution": solution, "operations": operations(solution)}
    return Example(question, number[1].replace(",", ""), columns, split_of(row))


def operations(solution: str) -> int:
    """Calculations in it. Most are annotated, `<<48/2=24>>`; some solutions leave out annotations, and those with none
    or one are mostly algebra: equations in the text count too."""
    return max(solution.count("<<"), ANNOTATION.sub("", solution).count("="))


def largest_number(example: Example) -> float:
    """In question and solution, in digits; infinite where fractions or percentages occur."""
    text = example.question + "\n" + example.columns["solution"]
    numbers = [number.replace(",", "") for number in NUMBER.findall(text)]
    if FRACTION.search(example.question) or any("." in number for number in numbers):
        return math.inf
    return max(map(int, numbers), default=0)


GSM8K = Preparation(
    name="gsm8k",
    ability="math",
    default_source="hf:openai/gsm8k:main:train",
    test_source="hf:openai/gsm8k:main:test",
    licence="MIT",
    homepage="https://github.com/openai/grade-school-math",
    reward="gsm8k",
    example=example,
    instruction="\nLet's think step by step and write the final answer, a number, after ####.",
    solved=(
        ("Ana has 3 apples and buys 4 more. How many apples has she now?", "3 + 4 = 7\n#### 7"),
        ("A box holds 6 eggs. How many eggs are in 5 boxes?", "6 * 5 = 30\n#### 30"),
        ("Tom had $20 and spent $8. Then he found $3. How much has he?", "20 - 8 = 12\n12 + 3 = 15\n#### 15"),
    ),
)
