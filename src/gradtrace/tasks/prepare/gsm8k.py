"""GSM8K: grade-school word problems; the answer is the number after `####`."""

from __future__ import annotations

import re

from gradtrace.errors import GradtraceError
from gradtrace.tasks.prepare.base import Example, Preparation, answer_of, question_of, split_of
from gradtrace.tasks.sources import Row

ANSWER = re.compile(r"(?:^|####)\s*\$?(-?[\d,]+(?:\.\d+)?)\s*$")


def example(row: Row) -> Example:
    question = question_of(row, "question", "prompt")
    solution = str(answer_of(row, "answer"))
    number = ANSWER.search(solution)
    if number is None:
        raise GradtraceError(f"an answer without `#### number` at its end: {solution[-80:]!r}.")
    columns = {"solution": solution, "operations": solution.count("<<")}
    return Example(question, number[1].replace(",", ""), columns, split_of(row))


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
