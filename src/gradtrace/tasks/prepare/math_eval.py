"""MATH-500 and AIME: for evaluation only. One file may hold several of them, told apart by `data_source`."""

from __future__ import annotations

import re

from gradtrace.tasks.prepare.base import Example, Preparation, answer_of, question_of
from gradtrace.tasks.sources import Row

INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def _benchmark(name: str, pattern: str, hub: str, licence: str) -> Preparation:
    def example(row: Row) -> Example | None:
        source = str(row.get("data_source", ""))
        if source and not re.search(pattern, source.lower()):
            return None
        return Example(
            question_of(row, "problem", "question", "prompt"), str(answer_of(row, "answer")), split="test"
        )

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


MATH500 = _benchmark("math500", r"math.?500", "HuggingFaceH4/MATH-500:test", "MIT")
AIME24 = _benchmark(
    "aime24", r"aime.?(20)?24", "HuggingFaceH4/aime_2024:train", "not stated by its publisher"
)
AIME25 = _benchmark("aime25", r"aime.?(20)?25", "math-ai/aime25:test", "Apache-2.0")
