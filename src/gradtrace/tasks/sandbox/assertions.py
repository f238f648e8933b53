"""Assertions of a test: which can be executed, how executed ones are counted, and which functions of a test are run.

`counted` rewrites the text of a test, so that each assertion in it reports to a `Counter` after it has held. The test
runs in the examiner's process, and no test can write the counter's names. An assertion is one of these:

    assert f(3) == 9                        not `assert 1 == 1`, and not `assert (f(3), 9)`: they always hold
    if f(3) != 9: raise AssertionError      it holds if the other branch is taken
    try: f(-1)                              it holds if the handler is entered
    except ValueError: pass
    else: assert False
    self.assertEqual, pytest.raises         functions of unittest, numpy.testing, pytest, …, not of the test
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any

HOLDS, RAISED, CHECKED = "<holds>", "<raised>", "<checked>"
"""Names in the rewritten text. They are no identifiers."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LITERALS = (ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.JoinedStr, ast.Lambda)
LIBRARIES = ("unittest", "numpy", "pandas", "pytest", "_pytest")
"""Their functions `assert…` and `raises` are assertions."""
SKIPPING = ("skip", "skipif", "xfail")
"""Marks of pytest: functions with one of them are not run."""


class Counter:
    """Number of assertions that have held."""

    def __init__(self) -> None:
        self.held = 0

    def names(self) -> dict[str, Any]:
        """What rewritten text needs in its namespace."""
        return {HOLDS: self.holds, RAISED: self.raised, CHECKED: self.checked}

    def holds(self) -> None:
        self.held += 1

    def raised(self) -> None:
        """Count the exception that is being handled, unless the failure in the same `try` raised it."""
        error = sys.exc_info()[1]
        self.held += isinstance(error, Exception) and not isinstance(error, AssertionError)

    def checked(self, function: Any) -> Any:
        """`function`, counted if it is a library's. One of the program or of the test is passed on as it is."""
        module = str(getattr(function, "__module__", ""))
        if not callable(function) or module.partition(".")[0] not in LIBRARIES:
            return function

        def counting(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            if hasattr(result, "__exit__"):
                return Expected(result, self)
            self.holds()
            return result

        return counting


class Expected:
    """`with pytest.raises(ValueError): …`, counted when it ends well."""

    def __init__(self, context: Any, counter: Counter) -> None:
        self.context = context
        self.counter = counter

    def __enter__(self) -> Any:
        return self.context.__enter__()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> Any:
        expected = self.context.__exit__(kind, error, traceback)
        if kind is None or expected:
            self.counter.holds()
        return expected


# ---------------------------------------------------------------- text


def is_assertion_name(name: str) -> bool:
    return name.startswith("assert") or name in ("raises", "warns")


def name_of(node: ast.AST) -> str:
    """`f` of `f`, `a.f` and of calls of them."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def is_failure(node: ast.stmt | None) -> bool:
    """`raise AssertionError`, `assert False`, `self.fail()`."""
    if isinstance(node, ast.Raise):
        return node.exc is not None and name_of(node.exc) == "AssertionError"
    if isinstance(node, ast.Assert):
        return isinstance(node.test, ast.Constant) and not node.test.value
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and name_of(node.value) == "fail"


def ends_in_failure(block: list[ast.stmt]) -> bool:
    return bool(block) and is_failure(block[-1])


def is_assertion(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert):
        names = any(isinstance(part, ast.Name) for part in ast.walk(node.test))
        return names and not isinstance(node.test, LITERALS)
    if isinstance(node, ast.If):
        return not isinstance(node.test, LITERALS) and ends_in_failure(node.body) != ends_in_failure(node.orelse)
    if isinstance(node, ast.Try):
        return bool(node.handlers) and (ends_in_failure(node.orelse) or ends_in_failure(node.body))
    return isinstance(node, ast.Name | ast.Attribute) and is_assertion_name(name_of(node))


class Rewriter(ast.NodeTransformer):
    """Adds the calls that count."""

    def visit_Assert(self, node: ast.Assert) -> Any:
        counts = is_assertion(node)
        self.generic_visit(node)
        return [node, call(HOLDS)] if counts else node

    def visit_If(self, node: ast.If) -> Any:
        if is_assertion(node):
            other = node.orelse if ends_in_failure(node.body) else node.body
            other.insert(0, call(HOLDS))
        return self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> Any:
        if is_assertion(node):
            for handler in node.handlers:
                handler.body.insert(0, call(HOLDS if ends_in_failure(node.orelse) else RAISED))
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> Any:
        loads = isinstance(node.ctx, ast.Load) and is_assertion_name(node.id)
        return call(CHECKED, node).value if loads else node

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.generic_visit(node)
        loads = isinstance(node.ctx, ast.Load) and is_assertion_name(node.attr)
        return call(CHECKED, node).value if loads else node


def call(name: str, *arguments: ast.expr) -> ast.Expr:
    return ast.Expr(ast.Call(ast.Name(name, ast.Load()), list(arguments), []))


def counted(source: str, name: str) -> CodeType:
    """The source, compiled so that its assertions are counted."""
    tree = ast.fix_missing_locations(Rewriter().visit(ast.parse(source)))
    return compile(tree, name, "exec", optimize=0)


def never_runs(node: ast.AST) -> bool:
    """`if False`, and `if __name__ == "__main__"`: a test is not run as a script."""
    if not isinstance(node, ast.If):
        return False
    is_false = isinstance(node.test, ast.Constant) and not node.test.value
    names = [part.id for part in ast.walk(node.test) if isinstance(part, ast.Name)]
    return is_false or (isinstance(node.test, ast.Compare) and names == ["__name__"])


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """The node and what is executed with it: of a function that is defined, decorators and defaults alone."""
    if isinstance(node, FUNCTIONS):
        parts: Iterable[ast.AST] = (*node.decorator_list, node.args)
    elif never_runs(node):
        parts = node.orelse  # type: ignore[attr-defined]
    else:
        yield node
        parts = ast.iter_child_nodes(node)
    for part in parts:
        yield from executed(part)


def inside(definition: ast.AST) -> Iterator[ast.AST]:
    """What a function executes when it is called; of a class, any of its methods."""
    for statement in definition.body:  # type: ignore[attr-defined]
        is_method = isinstance(definition, ast.ClassDef) and isinstance(statement, FUNCTIONS)
        yield from inside(statement) if is_method else (statement,)


def reached(tree: ast.Module, starts: Iterable[ast.AST]) -> tuple[list[ast.AST], set[str]]:
    """All that `starts` may execute, and the names of the functions and classes of the tree among it."""
    defined: dict[str, list[ast.AST]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            defined.setdefault(node.name, []).append(node)
    nodes: list[ast.AST] = []
    names: set[str] = set()
    waiting = list(starts)
    while waiting:
        for node in executed(waiting.pop()):
            name = name_of(node) if isinstance(node, ast.Name | ast.Attribute) else ""
            if name not in defined:
                nodes.append(node)
            elif name not in names:
                names.add(name)
                waiting += itertools.chain.from_iterable(map(inside, defined[name]))
    return nodes, names


# ---------------------------------------------------------------- what is run


class RowError(Exception):
    """Tests that decide nothing or cannot be run, in words that go on after the row's name."""


def collected(tree: ast.Module) -> list[str]:
    """What a test defines and leaves to its runner: TestCases, and functions `test…` and classes `Test…` not called."""
    nodes, named = reached(tree, tree.body)
    called = {name_of(node) for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    found: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            # A function that is named may be called by another name, with arguments that only the test knows.
            if node.name not in (named if needs_arguments(node) else called):
                found.append(node.name)
        elif isinstance(node, ast.ClassDef):
            bases = [name_of(base) for base in node.bases]
            is_case = any(base.endswith("TestCase") or base in found for base in bases)
            if is_case or (node.name.startswith("Test") and node.name not in called):
                found.append(node.name)
    return found


def needs_arguments(function: ast.FunctionDef) -> list[str]:
    """The arguments without a default, if no decorator may give them."""
    given = [argument.arg for argument in function.args.args if argument.arg != "self"]
    return given if len(given) > len(function.args.defaults) and not function.decorator_list else []


def check(setup: str, test: str) -> None:
    """RowError if no assertion of the test can be executed, or if something that it needs is not there."""
    tree, own = ast.parse(f"{setup}\n{test}\n"), ast.parse(test)
    names = collected(own)
    runs = [node for node in own.body if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and node.name in names]
    nodes, _ = reached(tree, [*own.body, *itertools.chain.from_iterable(map(inside, runs))])
    if not any(map(is_assertion, nodes)):
        raise RowError(
            f"has a test that tests nothing: {test[:200]!r}. No assertion in it is executed. Write `assert` at its top "
            "level, in functions test_… without arguments, or in a unittest.TestCase; `if __name__ == '__main__'` is "
            "not run"
        )
    check_arguments(runs)
    for module in imported(own):
        if importlib.util.find_spec(module) is None:
            raise RowError(f"has tests that import {module}, which is not installed")


def check_arguments(runs: Iterable[ast.AST]) -> None:
    """RowError if a test function has an argument that nobody gives it."""
    for node in runs:
        decorated_class = isinstance(node, ast.ClassDef) and (node.bases or node.decorator_list)
        parts = [] if decorated_class else [node, *getattr(node, "body", [])]
        for function in [part for part in parts if isinstance(part, ast.FunctionDef) and part.name.startswith("test")]:
            if missing := needs_arguments(function):
                raise RowError(
                    f"has a test function {function.name} with arguments ({', '.join(missing)}). "
                    "pytest.mark.parametrize can give them; fixtures are not supported"
                )


def imported(tree: ast.Module) -> list[str]:
    """The packages that a module imports at its top level."""
    found: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            found += [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module.partition(".")[0])
    return found


def ignore_runners(source: str) -> None:
    """`unittest.main()` at the top level of a test would end it; its cases are run in any case."""
    if "unittest" in source:
        importlib.import_module("unittest").main = lambda *arguments, **named: None  # type: ignore[attr-defined]


def run_collected(names: list[str], namespace: dict[str, Any]) -> None:
    """Run test functions and classes as pytest and unittest do; AssertionError if one fails or is skipped while it
    runs."""
    for name in names:
        value = namespace[name]
        if not isinstance(value, type):
            run_function(value)
        elif "unittest" in sys.modules and issubclass(value, sys.modules["unittest"].TestCase):
            run_cases(value)
        else:
            for method in [method for method in dir(value) if method.startswith("test")]:
                instance = value()
                getattr(instance, "setup_method", lambda: None)()
                run_function(getattr(instance, method), getattr(value, "pytestmark", []))
                getattr(instance, "teardown_method", lambda: None)()


def run_function(function: Callable[..., Any], marks: Iterable[Any] = ()) -> None:
    """Call a test function, once for each combination that its marks `parametrize` give."""
    marks = [*marks, *getattr(function, "pytestmark", [])]
    if any(mark.name in SKIPPING for mark in marks):
        return
    choices = [parameters(*mark.args[:2]) for mark in marks if mark.name == "parametrize"]
    for chosen in itertools.product(*choices):
        function(**{name: value for each in chosen for name, value in each.items()})


def parameters(names: Any, rows: Iterable[Any]) -> list[dict[str, Any]]:
    """Arguments by name of each row of `parametrize`."""
    is_one = isinstance(names, str) and "," not in names
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    found = []
    for row in rows:
        values = row.values if type(row).__name__ == "ParameterSet" else [row] if is_one else row  # pytest.param
        found.append(dict(zip(keys, values, strict=True)))
    return found


def run_cases(case: type) -> None:
    unittest = importlib.import_module("unittest")
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    skipped = [test for test, _ in result.skipped if not is_marked(test)]
    if skipped or not result.wasSuccessful():
        raise AssertionError(f"{case.__name__}: {result}")


def is_marked(test: Any) -> bool:
    """Is the test skipped by a decorator, and not because of what the program did?"""
    method = getattr(test, getattr(test, "_testMethodName", ""), None)
    return any(getattr(each, "__unittest_skip__", False) for each in (type(test), method))
