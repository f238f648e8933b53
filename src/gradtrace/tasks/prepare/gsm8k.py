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
)
