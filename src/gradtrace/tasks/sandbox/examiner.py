"""Runs in a jail of its own: the tests, with the candidate's names standing for calls into the other jail.

`assert f(3) == 9` runs here as written, with this process's `assert`, `==` and builtins. `f` is a stand-in that asks
the candidate's process for a value. The right value never leaves this process, and only data enters it.

Only entry points are the candidate's. Everything else a test names is defined by the test, a builtin or a module that
the examiner imports. What is left over could be a helper that judges (`close(f(3), 9)`), and a candidate that defines
it would be its own judge: such a test is refused (`resolve`).

A test passes if it ends well, an assertion in it has held (see `assertions`), and the candidate was asked a question.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import math
import os
import socket
import symtable
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from gradtrace.tasks.sandbox import CHANNEL, FAILED, NOTHING_ASKED, NOTHING_ASSERTED, PASSED, PAYLOAD
from gradtrace.tasks.sandbox.assertions import Counter, collected, counted, ignore_runners, run_collected
from gradtrace.tasks.verification.channel import Channel, ClosedError, Encoded, decode, encode

RELATIVE, ABSOLUTE = 1e-5, 1e-8
"""How far a float may be from the right one: as numpy.allclose has it."""


def main(packages: list[str]) -> None:
    with os.fdopen(PAYLOAD, "rb") as file:
        payload = json.load(file)
    verdicts = os.dup(1)
    os.dup2(2, 1)  # what tests print is no verdict
    sys.path += packages
    sys.setrecursionlimit(10_000)
    candidate = Candidate(Channel(socket.socket(fileno=CHANNEL)))
    ignore_runners(json.dumps([payload["setup"], payload["tests"]]))
    for test in payload["tests"]:
        if payload["kind"] == "functions":
            verdict = run_call(payload["entry_points"][0], test, candidate)
        else:
            verdict = run(payload["setup"], test, payload["entry_points"], candidate)
        os.write(verdicts, verdict)
        if verdict != PASSED and payload["stop"]:
            break
    os._exit(0)


def run(setup: str, test: str, entry_points: list[str], candidate: Candidate) -> bytes:
    counter = Counter()
    candidate.asked = 0
    try:
        names, modules = resolve(f"{setup}\n{test}\n", entry_points)
        theirs = {name: Remote(candidate, {"name": name}) for name in names}
        ours = {name: importlib.import_module(module) for name, module in modules.items()}
        namespace: dict[str, Any] = {"__name__": "examiner", **counter.names(), **ours, **theirs}
        exec(counted(setup, "<setup>"), namespace)
        namespace.update(theirs)  # a prompt's code may have a stub of the function that is asked for
        counter.held = 0  # what holds in the setup says nothing about the program
        exec(counted(test, "<test>"), namespace)
        run_collected(collected(ast.parse(test)), namespace)
    except BaseException:  # whatever ends a test early, it did not pass
        return FAILED
    if not candidate.asked:
        return NOTHING_ASKED
    return PASSED if counter.held else NOTHING_ASSERTED


def run_call(name: str, test: dict[str, Any], candidate: Candidate) -> bytes:
    """Is the value of the function with this name for the arguments of the test one of those that it expects?"""
    arguments = test["arguments"]  # a copy for this call: nobody looks at what becomes of it
    try:
        if arguments and isinstance(arguments[0], dict):
            arguments[0] = with_whole_keys(arguments[0])
        value = function_of(candidate, name)(*arguments)
        return PASSED if any(same_value(value, right) for right in test["expected"]) else FAILED
    except BaseException:
        return FAILED


def function_of(candidate: Candidate, name: str) -> Any:
    """The candidate's function, as a method of its class `Solution` where it has one."""
    try:
        return getattr(Remote(candidate, {"name": "Solution"})(), name)
    except Exception:  # no such class, or none that has the method
        return Remote(candidate, {"name": name})


def with_whole_keys(value: dict[str, Any]) -> dict[Any, Any]:
    """JSON made texts of keys that were whole numbers."""
    try:
        return {int(key): each for key, each in value.items()}
    except ValueError:
        return value


def same_value(value: Any, right: Any) -> bool:
    """Is a value what `right`, read from JSON, stands for? By element; a tuple may stand for a list."""
    if isinstance(right, list):
        same_kind = isinstance(value, list | tuple) and len(value) == len(right)
        return same_kind and all(map(same_value, value, right))
    if isinstance(right, dict):
        if not isinstance(value, dict) or len(value) != len(right):
            return False
        by_text = {as_key(key): each for key, each in value.items()}
        return all(key in by_text and same_value(by_text[key], each) for key, each in right.items())
    if isinstance(right, float) and isinstance(value, int | float):
        both_nan = math.isnan(value) and math.isnan(right)
        return both_nan or math.isclose(value, right, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return bool(value == right)


def as_key(key: Any) -> str:
    """The key that JSON makes of it."""
    return key if isinstance(key, str) else json.dumps(key)


class CandidateError(Exception):
    """The candidate raised an exception of its own class, or one that says something about loops to Python."""


END_OF_LOOP = (StopIteration, StopAsyncIteration)
"""Raised by a function, `map` would take them for the end of its arguments."""


class Candidate:
    """The other side of the socket."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.asked = 0
        """Questions since this was last set to 0."""

    def ask(self, do: str, *arguments: Any, **named: Any) -> Any:
        self.asked += 1
        question = {
            "do": do,
            "arguments": [encode(value, self.handle) for value in arguments],
            "named": {name: encode(value, self.handle) for name, value in named.items()},
        }
        try:
            self.channel.send(question)
            reply = self.channel.receive()
        except ClosedError:  # no test may take its end for an exception that it expects
            os._exit(0)
        if "error" in reply:
            raise error_of(str(reply["error"]), do)(str(reply["message"]))
        for value, after in zip(arguments[1:], reply["after"], strict=True):
            update(value, decode(after, self.resolve))
        return decode(reply["value"], self.resolve)

    def handle(self, value: Any) -> Encoded:
        if type(value) is Remote:
            return object.__getattribute__(value, "_handle")
        raise TypeError(f"{type(value).__name__} cannot be sent to the candidate")

    def resolve(self, handle: Encoded) -> Remote:
        return Remote(self, {"object": int(handle["object"]), "true": handle.get("true") is True})


def error_of(name: str, do: str) -> type[Exception]:
    """The builtin exception of this name; only the end of an iterator that was asked for its `next` ends a loop."""
    kind = getattr(builtins, name, None)
    if not isinstance(kind, type) or not issubclass(kind, Exception):
        return CandidateError
    return CandidateError if issubclass(kind, END_OF_LOOP) and do != "next" else kind


def update(value: Any, after: Any) -> None:
    """Make a container what it is after the call."""
    if type(value) is not type(after) or value == after:
        return
    if isinstance(value, list | deque):
        value.clear()
        value.extend(after)
    elif isinstance(value, dict | set):
        value.clear()
        value.update(after)


class Remote:
    """Stands for a name or an object of the candidate.

    What it is asked for comes back as data, and is compared here. It equals itself and nothing else, is neither true
    nor false if its class is the candidate's, and its methods with two underscores, `__contains__` or `__bool__`, are
    never asked for a verdict.
    """

    def __init__(self, candidate: Candidate, handle: Encoded) -> None:
        object.__setattr__(self, "_candidate", candidate)
        object.__setattr__(self, "_handle", handle)

    def _ask(self, do: str, *arguments: Any, **named: Any) -> Any:
        candidate: Candidate = object.__getattribute__(self, "_candidate")
        return candidate.ask(do, self, *arguments, **named)

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._ask("call", *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{name} of the candidate's objects is not asked for")
        return self._ask("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("set_item", key, value)

    def __contains__(self, value: Any) -> bool:
        return value in list(self)

    def __len__(self) -> int:
        return int(self._ask("length"))

    def __bool__(self) -> bool:
        if object.__getattribute__(self, "_handle").get("true"):
            return True
        raise TypeError("an object of the candidate's own class is neither true nor false")

    def __str__(self) -> str:
        return str(self._ask("text"))

    def __repr__(self) -> str:
        return str(self._ask("repr"))

    def __next__(self) -> Any:
        return self._ask("next")

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ask("list"))


MODULES = {name: name for name in sys.stdlib_module_names} | {"np": "numpy", "numpy": "numpy"}
WITH_STAR = (
    *("bisect", "collections", "copy", "datetime", "functools", "heapq", "itertools", "math", "operator"),
    *("random", "re", "statistics", "string", "typing"),
)
"""Modules of which tests import everything."""


class UnresolvedError(Exception):
    """Names that may be the candidate's or the examiner's."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(", ".join(sorted(names)))
        self.names = sorted(names)


def resolve(source: str, declared: Iterable[str]) -> tuple[set[str], dict[str, str]]:
    """(names of the candidate, {name: module to import}) of a test with what is set up before it.

    Without any declared name the only one that the test does not define is the candidate's, or the only one that it
    calls, if it passes the others to that one.
    """
    tree = ast.parse(source)
    declared = set(declared)
    free = free_names(source) - starred(tree) - declared
    modules = {name: MODULES[name] for name in free & MODULES.keys() if is_module(tree, name)}
    free -= modules.keys()
    if not declared and not free:
        return outermost_call(tree) - names_in(source)[1], modules
    if not declared and len(free) == 1:
        return free, modules
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    mine = declared or called & free
    unresolved = {name for name in free - mine if not is_only_passed(tree, name, mine)}
    if unresolved or (not declared and len(mine) != 1):
        raise UnresolvedError(unresolved or free)
    return mine | free, modules


def free_names(source: str) -> set[str]:
    """Names that the source uses and that neither it nor Python defines.

    A builtin is never the candidate's, or redefining `set` would pass `set(f(x)) == set(y)`.
    """
    used, defined = names_in(source)
    return used - defined - set(dir(builtins)) - {"__name__", "__file__"}


def names_in(source: str) -> tuple[set[str], set[str]]:
    """(names that the source uses as its own globals, those among all names that it defines)."""
    top = symtable.symtable(source, "<test>", "exec")
    defined = {
        symbol.get_name()
        for symbol in top.get_symbols()
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
    }
    used: set[str] = set()
    tables = [top]
    while tables:
        table = tables.pop()
        for symbol in table.get_symbols():
            if symbol.is_global() or (table is top and symbol.is_referenced()):
                used.add(symbol.get_name())
                if table is not top and symbol.is_assigned():
                    defined.add(symbol.get_name())
        tables += table.get_children()
    return used, defined


def starred(tree: ast.Module) -> set[str]:
    """The names that `from math import *` brings."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in WITH_STAR and node.names[0].name == "*":
            found |= set(dir(importlib.import_module(node.module)))
    return found


def is_module(tree: ast.Module, name: str) -> bool:
    """Is the name used as `name.something` alone?"""
    uses = sum(isinstance(node, ast.Name) and node.id == name for node in ast.walk(tree))
    return uses == sum(
        isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
        for node in ast.walk(tree)
    )


def is_only_passed(tree: ast.Module, name: str, functions: set[str]) -> bool:
    """Is the name an argument of these functions and nothing else? Then it answers nothing here."""
    uses = sum(isinstance(node, ast.Name) and node.id == name for node in ast.walk(tree))
    return uses == sum(
        isinstance(argument, ast.Name) and argument.id == name
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions
        for argument in (*node.args, *(keyword.value for keyword in node.keywords))
    )


def outermost_call(tree: ast.Module) -> set[str]:
    """The function of a test that names nothing but builtins: one task of MBPP wants a function called `sum`."""
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {function.id for function in calls[:1] if isinstance(function, ast.Name)}
