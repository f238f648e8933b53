"""MBPP: short Python problems with asserts as tests. The prompt shows them, since they name the function."""

from __future__ import annotations

import json

from gradtrace.tasks.prepare.base import Example, Preparation, question_of, split_of
from gradtrace.tasks.sources import Row


def example(row: Row) -> Example:
    tests = [str(test) for test in row["test_list"]]
    imports = [str(line) for line in row.get("test_imports") or []]
    question = f"{question_of(row, 'prompt', 'text').strip()}\nYour code must pass these tests:\n" + "\n".join(tests)
    return Example(
        question,
        json.dumps({"test_list": tests, "test_imports": imports}),
        {"test_list": tests, "test_imports": imports, "code": str(row.get("code", ""))},
        split_of(row),
    )


MBPP = Preparation(
    name="mbpp",
    ability="code",
    default_source="hf:google-research-datasets/mbpp:sanitized:train",
    test_source="hf:google-research-datasets/mbpp:sanitized:test",
    licence="CC-BY-4.0 (the text), Apache-2.0 (its repository)",
    homepage="https://github.com/google-research/google-research/tree/master/mbpp",
    reward="code",
    example=example,
    instruction="\nAnswer with one Python code block.",
)
