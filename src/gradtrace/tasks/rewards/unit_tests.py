"""The tests of a programming problem, in the forms that data sets give them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gradtrace.errors import GradtraceError
from gradtrace.tasks.rewards.function import shorten

if TYPE_CHECKING:
    from gradtrace.tasks.base import Item


@dataclass(frozen=True)
class UnitTests:
    kind: str
    """`calls`: Python source, mostly asserts. `script`: what to read and what to print."""
    tests: list[Any]
    """Sources, or {"input", "output"}."""
    setup: str = ""
    """Source that runs before each test: imports."""
    entry_points: list[str] = field(default_factory=list)
    """Names that are the candidate's even if they look like something else."""


def unit_tests(item: Item) -> UnitTests:
    """The tests of an item; GradtraceError if it has none.

    | data | keys, in the item, in its `answer` or in `reward_model.ground_truth` (both may be JSON text) |
    |---|---|
    | MBPP | `test_list`, with `test_imports` and `test_setup_code` |
    | HumanEval | `test`, `entry_point` |
    | APPS, TACO, verl | `inputs`, `outputs`, and `fn_name` for functions; also inside `input_output` |
    | LiveCodeBench, DeepCoder | a list of {`input`, `output`, `testtype`} |
    """
    for source in (item, item.get("answer"), (item.get("reward_model") or {}).get("ground_truth")):
        found = tests_in(parsed(source))
        if found is not None:
            return found
    raise GradtraceError(
        "reward.name=code: the item has no tests. It needs `test_list` (asserts), `inputs` and `outputs`, or another "
        f"form that docs/rewards.md lists. Its keys: {', '.join(item)}; "
        f"its answer: {shorten(str(item.get('answer')), 200)!r}."
    )


def parsed(source: Any) -> Any:
    if not isinstance(source, str):
        return source
    try:
        return json.loads(source)
    except ValueError:
        return None


def tests_in(source: Any) -> UnitTests | None:
    if isinstance(source, list | tuple) or hasattr(source, "tolist"):
        return from_list(list(source))
    if not isinstance(source, dict):
        return None
    if "input_output" in source:
        return tests_in(parsed(source["input_output"]))
    if source.get("test_list") is not None:
        imports = source.get("test_imports")  # an array, from pandas, has no truth value
        lines = [*([] if imports is None else imports), source.get("test_setup_code") or ""]
        return UnitTests("calls", [str(test) for test in source["test_list"]], "\n".join(lines))
    if source.get("test") and source.get("entry_point"):
        name = str(source["entry_point"])
        return UnitTests("calls", [f"check({name})"], str(source["test"]), [name])
    if source.get("inputs") is not None and source.get("outputs") is not None:
        inputs, outputs = list(source["inputs"]), list(source["outputs"])
        if function := source.get("fn_name"):
            pairs = zip(inputs, outputs, strict=True)
            return UnitTests("calls", [call_test(str(function), given, right) for given, right in pairs])
        return from_list([{"input": i, "output": o} for i, o in zip(inputs, outputs, strict=True)])
    return None


def from_list(tests: list[Any]) -> UnitTests | None:
    if tests and all(isinstance(test, str) for test in tests):
        return UnitTests("calls", tests)
    if not tests or not all(
        isinstance(test, dict) and "input" in test and "output" in test for test in tests
    ):
        return None
    if tests[0].get("testtype") == "functional":
        name = (tests[0].get("metadata") or {}).get("func_name")
        if not name:
            return None
        # One JSON value a line: the arguments in order.
        calls = [
            call_test(
                f"Solution().{name}",
                [json.loads(line) for line in test["input"].splitlines()],
                json.loads(test["output"]),
            )
            for test in tests
        ]
        return UnitTests("calls", calls)
    return UnitTests("script", [{key: as_text(test[key]) for key in ("input", "output")} for test in tests])


def call_test(name: str, arguments: Any, right: Any) -> str:
    return f"assert {name}(*{list(arguments)!r}) == {right!r}"


def as_text(value: Any) -> str:
    """Some data sets keep the lines of a text in a list."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
