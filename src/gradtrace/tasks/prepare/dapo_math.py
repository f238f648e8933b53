"""DAPO-Math-17k: competition problems with integer answers. The published rows hold many prompts more than once."""

from __future__ import annotations

import re

from gradtrace.tasks.prepare.base import Example, Preparation, answer_of, question_of, split_of
from gradtrace.tasks.sources import Row

# The text that DAPO's own release puts around every problem; the instruction below takes its place.
WRAPPING = re.compile(
    r"^Solve the following math problem step by step\. The last line.*?\n\n|\n\nRemember to put your answer.*$",
    re.DOTALL,
)


def example(row: Row) -> Example:
    question = WRAPPING.sub("", question_of(row, "problem", "question", "prompt"))
    return Example(question, str(answer_of(row, "answer", "solution")).strip(), split=split_of(row))


DAPO_MATH = Preparation(
    name="dapo_math",
    ability="math",
    default_source="hf:BytedTsinghua-SIA/DAPO-Math-17k:train",
    test_source="",
    licence="Apache-2.0",
    homepage="https://huggingface.co/datasets/BytedTsinghua-SIA/DAPO-Math-17k",
    reward="math",
    example=example,
    instruction="\nPlease reason step by step, and put your final answer within \\boxed{}.",
)
