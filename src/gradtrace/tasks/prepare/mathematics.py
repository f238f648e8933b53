"""Competition mathematics: DAPO-Math-17k to train on; MATH-500 and AIME for evaluation only.

The published rows of DAPO-Math hold many prompts more than once. A file may hold several of the benchmarks, told apart
by `data_source`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from gradtrace.tasks.prepare.base import Example, Preparation, answer_of, question_of, split_of
from gradtrace.tasks.sources import Row

INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
# The text that DAPO's own release puts around every problem; the instruction takes its place.
WRAPPING = re.compile(
    r"^Solve the following math problem step by step\. The last line.*?\n\n|\n\nRemember to put your answer.*$",
    re.DOTALL,
)


def _math(name: str, hub: str, licence: str, example: Callable[[Row], Example | None]) -> Preparation:
    return Preparation(
        name=name,
        ability="math",
        default_source=f"hf:{hub}",
        test_source="",
        licence=licence,
        homepage=f"https://huggingface.co/datasets/{hub.split(':')[0]}",
        reward="math",
        example=example,
        instruction=INSTRUCTION,
    )


def _dapo_example(row: Row) -> Example:
    question = WRAPPING.sub("", question_of(row, "problem", "question", "prompt"))
    return Example(question, str(answer_of(row, "answer", "solution")).strip(), split=split_of(row))


def _benchmark(name: str, pattern: str, hub: str, licence: str) -> Preparation:
    def example(row: Row) -> Example | None:
        source = str(row.get("data_source", ""))
        if source and not re.search(pattern, source.lower()):
            return None
        question = question_of(row, "problem", "question", "prompt")
        return Example(question, str(answer_of(row, "answer")), split="test")

    return _math(name, hub, licence, example)


DAPO_MATH = _math("dapo_math", "BytedTsinghua-SIA/DAPO-Math-17k:train", "Apache-2.0", _dapo_example)
MATH500 = _benchmark("math500", r"math.?500", "HuggingFaceH4/MATH-500:test", "MIT")
AIME24 = _benchmark("aime24", r"aime.?(20)?24", "HuggingFaceH4/aime_2024:train", "not stated by its publisher")
AIME25 = _benchmark("aime25", r"aime.?(20)?25", "math-ai/aime25:test", "Apache-2.0")
