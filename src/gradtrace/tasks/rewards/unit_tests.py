"""The tests of a programming problem, in the forms that data sets give them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from gradtrace.errors import GradtraceError
from gradtrace.tasks.rewards.entry_points import completed
from gradtrace.tasks.rewards.function import shorten
from gradtrace.tasks.sandbox.names import UnresolvedError

if TYPE_CHECKING:
    from gradtrace.tasks.base import Item


NOT_FINITE = "from math import inf, nan"
"""What Python writes for numbers that are not finite are names to it."""


@dataclass(frozen=True)
class UnitTests:
    kind: str
    """`calls`: Python source, mostly asserts. `script`: what to read and what to print."""
    tests: list[Any]
    """Sources, or {"input", "output"}."""
    setup: str = ""
    """Source that runs before each test: imports."""
    entry_points: list[str] = field(default_factory=list)
    """Names that are the candidate's."""


def unit_tests(item: Item) -> UnitTests:
    """The tests of an item; GradtraceError if it has none, or some that decide nothing.

    | data | keys, in the item, in its `answer` or in `reward_model.ground_truth` (both may be JSON text) |
    |---|---|
    | MBPP | `test_list`, with `test_imports`, `test_setup_code` and `entry_points` |
    | HumanEval | `test`, `entry_point` |
    | APPS, TACO, verl | `inputs`, `outputs`, and `fn_name` for functions; also inside `input_output` |
    | LiveCodeBench, DeepCoder | a list of {`input`, `output`, `testtype`} |
    """
    for source in (item, item.get("answer"), (item.get("reward_model") or {}).get("ground_truth")):
        found = tests_in(parsed(source))
        if found is not None and found.tests:
            return found if found.kind == "script" else with_owners(found, item)
    raise GradtraceError(
        f"reward.name=code: {place(item)} has no tests, and a program cannot pass none. It needs `test_list` "
        "(asserts), `inputs` and `outputs`, or another form that docs/rewards.md lists. "
        f"Its keys: {', '.join(item)}; its answer: {shorten(str(item.get('answer')), 200)!r}."
    )


def with_owners(tests: UnitTests, item: Item) -> UnitTests:
    """The tests with every name in them either declared to be the model's or defined beside them."""
    if blank := next((test for test in tests.tests if not has_statement(test)), None):
        raise GradtraceError(f"reward.name=code: {place(item)} has a test that tests nothing: {blank!r}.")
    source = (str(item.get("prompt", "")), str(item.get("code", "")))
    try:
        setup, names = completed(tests.setup, tuple(tests.tests), tuple(tests.entry_points), *source)
    except UnresolvedError as error:
        raise GradtraceError(
            f"reward.name=code: the tests of {place(item)} use {error}, which they do not define. A program that "
            "defined a name by which it is judged would pass them. Give the names of the functions that are to be "
            "written in a column `entry_points`, and define the others in `test_setup_code`."
        ) from error
    except (SyntaxError, ValueError, RecursionError) as error:
        raise GradtraceError(f"reward.name=code: the tests of {place(item)} are no Python: {error}.") from error
    return replace(tests, setup=setup, entry_points=list(names))


def has_statement(test: str) -> bool:
    return any(line.strip() and not line.strip().startswith("#") for line in test.splitlines())


def place(item: Item) -> str:
    """Words that name the item in a message."""
    return str(item.get("row") or f"the item with the prompt {shorten(str(item.get('prompt')), 80)!r}")


def parsed(source: Any) -> Any:
    if not isinstance(source, str):
        return source
    try:
        return json.loads(source)
    except (ValueError, RecursionError):
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
        names = source.get("entry_points")
        return UnitTests(
            "calls",
            [str(test) for test in source["test_list"]],
            "\n".join(lines),
            [] if names is None else [str(name) for name in names],
        )
    if source.get("test") and source.get("entry_point"):
        name = str(source["entry_point"])
        return UnitTests("calls", [f"check({name})"], str(source["test"]), [name])
    if source.get("inputs") is not None and source.get("outputs") is not None:
        inputs, outputs = list(source["inputs"]), list(source["outputs"])
        if function := source.get("fn_name"):
            pairs = zip(inputs, outputs, strict=True)
            return of_calls(str(function), list(pairs))
        return from_list([{"input": i, "output": o} for i, o in zip(inputs, outputs, strict=True)])
    return None


def from_list(tests: list[Any]) -> UnitTests | None:
    if tests and all(isinstance(test, str) for test in tests):
        return UnitTests("calls", tests)
    if not tests or not all(isinstance(test, dict) and "input" in test and "output" in test for test in tests):
        return None
    if tests[0].get("testtype") == "functional":
        name = (tests[0].get("metadata") or {}).get("func_name")
        if not name:
            return None
        # One JSON value a line: the arguments in order.
        pairs = [
            ([json.loads(line) for line in test["input"].splitlines()], json.loads(test["output"])) for test in tests
        ]
        return of_calls(f"Solution().{name}", pairs)
    return UnitTests("script", [{key: as_text(test[key]) for key in ("input", "output")} for test in tests])


def of_calls(function: str, pairs: list[tuple[Any, Any]]) -> UnitTests:
    """Calls with these arguments have these values."""
    tests = [f"assert {function}(*{list(arguments)!r}) == {right!r}" for arguments, right in pairs]
    name = function.partition("(")[0].partition(".")[0]
    return UnitTests("calls", tests, NOT_FINITE if "inf" in str(pairs) or "nan" in str(pairs) else "", [name])


def as_text(value: Any) -> str:
    """Some data sets keep the lines of a text in a list."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
