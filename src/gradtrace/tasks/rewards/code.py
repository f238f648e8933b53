"""Programs, judged by their tests, in a sandbox; the tests in the forms that data sets give them; and which functions
are the model's, which the tests'.

A name that the tests use and do not define is looked for, in this order: in the code that the prompt shows (a helper;
a stub without a body is what the model is to write), among what the reference solution (`code`) defines, of which the
model is to write one function. A name that is still open is an error of the data: a model that defined it would judge
itself.
"""

from __future__ import annotations

import ast
import functools
import json
import logging
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from gradtrace.errors import GradtraceError
from gradtrace.tasks.answers import code_of
from gradtrace.tasks.rewards import batched, checked_by, register_reward, shorten
from gradtrace.tasks.sandbox import NO_ASSERTION, PATIENCE, SERVICE
from gradtrace.tasks.sandbox.assertions import FUNCTIONS, RowError, check
from gradtrace.tasks.sandbox.examiner import UnresolvedError, free_names, names_in, resolve
from gradtrace.tasks.verification.channel import Message
from gradtrace.tasks.verification.pool import shared_pool

if TYPE_CHECKING:
    from gradtrace.tasks.base import Item

logger = logging.getLogger(__name__)

LEAST_MEMORY = 128


def check_item(item: Item) -> None:
    """GradtraceError if no program can be judged by the item."""
    unit_tests(item)


@register_reward("code")
@batched
@checked_by(check_item)
def code(
    responses: list[str],
    items: list[Item],
    *,
    partial: bool = False,
    timeout: float = 10.0,
    memory_mb: int = 512,
    workers: int = 0,
    allow_unsafe: bool = False,
) -> list[float]:
    """1 if the response's Python code passes all tests of the item; with `partial`, the share that it passes.

    Every response runs in a sandbox, with at most `timeout` seconds of computing (a script: for each input) and
    `memory_mb` megabytes, `workers` at once; 0 is one per core. Where Linux grants no namespaces nothing is run, unless
    `allow_unsafe` says so.
    """
    if memory_mb < LEAST_MEMORY:
        raise GradtraceError(
            f"reward.options.memory_mb={memory_mb} is too small: at least {LEAST_MEMORY}, of which the sandbox's own "
            "processes need a part."
        )
    requests = [
        request(response, item, partial, timeout, memory_mb, allow_unsafe)
        for response, item in zip(responses, items, strict=True)
    ]
    replies = shared_pool(SERVICE, workers).map(requests)
    for reply, item in zip(replies, items, strict=True):
        if reply.get("failed") == "tests":
            raise GradtraceError(f"reward.name=code: {place(item)} {reply['reason']}.")
        if reply.get("failed") == "refused":
            raise GradtraceError(
                f"reward.name=code runs programs that a model wrote, and this machine allows no isolation: "
                f"{reply['reason']}. Allow user namespaces (sysctl kernel.unprivileged_userns_clone=1 and "
                "kernel.apparmor_restrict_unprivileged_userns=0; in Docker --security-opt seccomp=unconfined), or, "
                "where nothing on the machine needs protection, reward.options.allow_unsafe=true: then programs run as "
                "your user, with all your files, under limits of time and memory alone."
            )
        if reply.get("failed") == "setup":
            raise GradtraceError(f"The sandbox could not start a program:\n{reply['reason']}")
    lost = sum("failed" in reply for reply in replies)
    if lost:
        logger.warning("%d of %d programs took their worker process down twice and score 0", lost, len(replies))
    unasserted = sorted({place(item) for reply, item in zip(replies, items, strict=True) if no_assertion(reply)})
    if unasserted:
        logger.warning(
            "programs ended tests of %d rows well, without one assertion that held, and score 0: %s; if right programs "
            "do that, too, the tests need an assertion that is always executed",
            len(unasserted),
            "; ".join(unasserted[:3]),
        )
    ended = Counter(reply["why"] for reply in replies if reply.get("why") and not no_assertion(reply))
    if ended:
        logger.info("of %d programs some were ended early: %s", len(replies), dict(ended))
    return [
        score(reply.get("passed", []), len(request["tests"]), partial)
        for reply, request in zip(replies, requests, strict=True)
    ]


def request(response: str, item: Item, partial: bool, timeout: float, memory_mb: int, allow_unsafe: bool) -> Message:
    tests = unit_tests(item)
    return {
        "kind": tests.kind,
        "code": code_of(response),
        "setup": tests.setup,
        "tests": tests.tests,
        "entry_points": tests.entry_points,
        "stop": not partial,
        "seconds": timeout,
        # Until when the pool waits: a script runs once for each input.
        "timeout": PATIENCE * timeout * (len(tests.tests) if tests.kind == "script" else 1),
        "memory": memory_mb << 20,
        "unsafe": allow_unsafe,
    }


def no_assertion(reply: Message) -> bool:
    return reply.get("why") == NO_ASSERTION


def score(passed: list[bool], total: int, partial: bool) -> float:
    return sum(passed) / total if partial else float(sum(passed) == total)


@dataclass(frozen=True)
class UnitTests:
    kind: str
    """`calls`: Python source, mostly asserts. `functions`: arguments and values of the one entry point. `script`: what
    to read and what to print."""
    tests: list[Any]
    """Sources, {"arguments", "expected": [each value that is right]}, or {"input", "output"}."""
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
    verl = item.get("reward_model")
    try:
        if verl is not None and not isinstance(verl, dict):
            raise RowError(f"has {shorten(repr(verl), 80)} in `reward_model`; it must be an object with ground_truth")
        for source in (item, item.get("answer"), (verl or {}).get("ground_truth")):
            found = tests_in(parsed(source))
            if found is not None and found.tests:
                return with_owners(found, item) if found.kind == "calls" else found
    except RowError as error:
        raise GradtraceError(f"reward.name=code: {place(item)} {error}.") from error
    raise GradtraceError(
        f"reward.name=code: {place(item)} has no tests, and a program cannot pass none. It needs `test_list` "
        "(asserts), `inputs` and `outputs`, or another form that docs/rewards.md lists. "
        f"Its keys: {', '.join(item)}; its answer: {shorten(str(item.get('answer')), 200)!r}."
    )


def with_owners(tests: UnitTests, item: Item) -> UnitTests:
    """The tests with every name in them either declared to be the model's or defined beside them."""
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
    """The tests in one of the forms; None if it is none, RowError if it is one with a fault."""
    if isinstance(source, list | tuple) or hasattr(source, "tolist"):
        return from_list(list(source))
    if not isinstance(source, dict):
        return None
    if "input_output" in source:
        return tests_in(parsed(source["input_output"]))
    if source.get("test_list") is not None:
        lines = [*texts(source, "test_imports"), str(source.get("test_setup_code") or "")]
        return UnitTests("calls", texts(source, "test_list"), "\n".join(lines), texts(source, "entry_points"))
    if source.get("test") and source.get("entry_point"):
        name, test = str(source["entry_point"]), str(source["test"])
        if "check" in defined_in(test):
            return UnitTests("calls", [f"check({name})"], test, [name])
        return UnitTests("calls", [test], "", [name])
    if source.get("inputs") is not None and source.get("outputs") is not None:
        return from_pairs(source)
    return None


def texts(source: dict[str, Any], column: str) -> list[str]:
    """A column of texts; empty where there is none."""
    values = listed(source, column) if source.get(column) is not None else []
    for index, value in enumerate(values):
        if not isinstance(value, str):
            raise RowError(f"has {shorten(repr(value), 80)} in `{column}[{index}]`, which must be a text")
    return values


def listed(source: dict[str, Any], column: str) -> list[Any]:
    values = source[column]
    if isinstance(values, list | tuple) or hasattr(values, "tolist"):  # an array, from pandas
        return list(values)
    raise RowError(f"has {shorten(repr(values), 80)} in `{column}`, which must be a list")


def from_pairs(source: dict[str, Any]) -> UnitTests | None:
    """`inputs` and `outputs`, of scripts or, with `fn_name`, of a function."""
    inputs, outputs = listed(source, "inputs"), listed(source, "outputs")
    if len(inputs) != len(outputs):
        raise RowError(f"has {len(inputs)} `inputs` and {len(outputs)} `outputs`; each input needs one output")
    function = source.get("fn_name")
    if function is None or function == "":
        return from_list([{"input": i, "output": o} for i, o in zip(inputs, outputs, strict=True)])
    if not isinstance(function, str) or not function.isidentifier():
        raise RowError(f"has {shorten(repr(function), 80)} in `fn_name`, which must be the name of a function")
    read = [as_call(*pair, f"inputs[{i}]", f"outputs[{i}]") for i, pair in enumerate(zip(inputs, outputs, strict=True))]
    # APPS puts every right value into a list.
    boxed = all(isinstance(right, list) and len(right) == 1 for _, right in read)
    tests = [{"arguments": arguments, "expected": [right, right[0]] if boxed else [right]} for arguments, right in read]
    return UnitTests("functions", tests, entry_points=[function])


def as_call(given: Any, right: Any, where: str, where_right: str) -> tuple[list[Any], Any]:
    """(arguments, value) of a call; in a text, each argument is a line of JSON, and the value is JSON."""
    if isinstance(given, str):
        arguments = [as_json(line, where) for line in given.splitlines() if line.strip()]
        return arguments, as_json(right, where_right) if isinstance(right, str) else right
    if isinstance(given, list | tuple) or hasattr(given, "tolist"):
        return list(given), right
    raise RowError(
        f"has {shorten(repr(given), 80)} in `{where}`, which must be a list of arguments or a text with one JSON value "
        "for each line"
    )


def as_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"has {shorten(repr(text), 80)} in `{where}`, which is no JSON: {error}") from error


def from_list(tests: list[Any]) -> UnitTests | None:
    if not tests or not all(isinstance(test, str | dict) for test in tests):
        return None
    if all(isinstance(test, str) for test in tests):
        return UnitTests("calls", tests)
    if not all(isinstance(test, dict) and "input" in test and "output" in test for test in tests):
        return None
    if all(test.get("testtype") != "functional" for test in tests):
        return UnitTests("script", [{key: as_text(test[key]) for key in ("input", "output")} for test in tests])
    names = {function_name(test, index) for index, test in enumerate(tests)}
    if len(names) > 1:
        raise RowError(f"has tests of several functions in `metadata`: {', '.join(sorted(names))}")
    read = [as_call(test["input"], test["output"], f"input[{i}]", f"output[{i}]") for i, test in enumerate(tests)]
    return UnitTests("functions", [{"arguments": a, "expected": [right]} for a, right in read], entry_points=[*names])


def function_name(test: dict[str, Any], index: int) -> str:
    """What LiveCodeBench says about one of its tests."""
    metadata = test.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("func_name"), str):
        raise RowError(
            f"has {shorten(repr(metadata), 80)} in `metadata` of test {index}, which must be an object with func_name"
        )
    return str(metadata["func_name"])


def as_text(value: Any) -> str:
    """Some data sets keep the lines of a text in a list."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


DEFINITION = re.compile(r"(?:async def|def|class) (\w+)")
IMPORT = re.compile(r"(?:import|from) \w|[A-Z][A-Z0-9_]* = [\w.'\"([{-]")
"""An import, or a constant in capitals."""


@functools.lru_cache(maxsize=1024)
def completed(
    setup: str, tests: tuple[str, ...], declared: tuple[str, ...], prompt: str, reference: str
) -> tuple[str, tuple[str, ...]]:
    """(setup with the row's helpers, entry points), with which every name in the tests has one owner.

    Raises UnresolvedError, RowError, and SyntaxError or ValueError if the tests are no Python.
    """
    helpers, stubs = definitions(prompt)
    for test in tests:
        prompt = prompt.replace(test, "")  # what tests name, the prompt names as well, if it shows them
    names = set(declared)
    for test in tests:
        while True:
            source = f"{setup}\n{test}\n"
            try:
                theirs, _ = resolve(source, names)
                break
            except UnresolvedError as error:
                shown = [name for name in error.names if name in helpers]
                if shown:
                    setup = "\n".join([helpers.pop(name) for name in shown] + [setup])
                    continue
                free = free_names(source)
                mine = set(declared) or names | (free & stubs or to_be_written(source, reference, prompt))
                own = without(reference, mine) if (free - mine) & defined_in(reference) else ""
                if not mine or (mine == names and (not own or own in setup)):
                    raise
                names, setup = mine, setup if own in setup else f"{own}\n{setup}"
        check(setup, test)
        if not theirs & names_in(source)[0]:
            raise RowError(f"has a test that asks nothing of the program: {shorten(test, 200)!r}")
    return setup, tuple(sorted(names))


def to_be_written(source: str, reference: str, prompt: str) -> set[str]:
    """What a program is to define of what tests use and the reference solution defines: one function, the only one or
    the only one that the prompt names, and the classes of its arguments. Empty where that is not certain: a helper that
    judges would be taken for the program's."""
    free = free_names(source) & defined_in(reference)
    classes = free & defined_in(reference, (ast.ClassDef,))
    choice = free - classes or classes
    chosen = choice if len(choice) == 1 else {name for name in choice if re.search(rf"\b{name}\b", prompt)}
    is_certain = len(chosen) == 1 and all(is_input(ast.parse(source), name, chosen) for name in classes - chosen)
    return chosen | classes if is_certain else set()


def is_input(tree: ast.Module, name: str, functions: set[str]) -> bool:
    """Is a class only used to make arguments of these functions?"""
    loads = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    given = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions
        for argument in (*node.args, *(keyword.value for keyword in node.keywords))
        for part in ast.walk(argument)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            uses = [load for load in loads if load.id == node.targets[0].id]
            if all(id(use) in given for use in uses):
                given |= set(map(id, ast.walk(node.value)))
    asked = {id(part) for node in ast.walk(tree) if isinstance(node, ast.Attribute) for part in ast.walk(node.value)}
    return all(id(load) in given - asked for load in loads if load.id == name)


def without(reference: str, names: set[str]) -> str:
    """Imports, constants and definitions of the reference solution but for those with these names."""
    kept = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, *FUNCTIONS, ast.ClassDef)
    body = [node for node in ast.parse(reference).body if isinstance(node, kept)]
    return "\n".join(ast.unparse(node) for node in body if getattr(node, "name", "") not in names)


def definitions(prompt: str) -> tuple[dict[str, str], set[str]]:
    """({name: source} of what the prompt defines, with its imports and constants; names of what it leaves to be
    written)."""
    lines = prompt.splitlines()
    imports = "\n".join(line for line in lines if IMPORT.match(line) and is_python(line))
    helpers: dict[str, str] = {}
    stubs: set[str] = set()
    for start, line in enumerate(lines):
        if not (found := DEFINITION.match(line)):
            continue
        end = start + 1
        while end < len(lines) and (not lines[end].strip() or lines[end][0] in " \t)"):
            end += 1
        source = "\n".join(lines[start:end])
        if not is_python(source):
            continue
        node = ast.parse(source).body[0]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_stub(node):
            stubs.add(found[1])
        else:
            helpers[found[1]] = f"{imports}\n{source}"
    return helpers, stubs


def is_stub(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Nothing but a docstring, `...` or `pass`."""
    return all(
        isinstance(part, ast.Pass) or (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
        for part in function.body
    )


def defined_in(source: str, kinds: tuple[type[ast.AST], ...] = (*FUNCTIONS, ast.ClassDef)) -> set[str]:
    if not is_python(source):
        return set()
    return {str(getattr(node, "name", "")) for node in ast.parse(source).body if isinstance(node, kinds)}


def is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
