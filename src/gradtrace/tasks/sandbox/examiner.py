"""Runs in a jail of its own: the tests, with the candidate's names standing for calls into the other jail.

`assert f(3) == 9` runs here as written, with this process's `assert`, `==` and builtins. `f` is a stand-in that asks
the candidate's process for a value. The right value never leaves this process, and only data enters it.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import socket
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

from gradtrace.tasks.sandbox import linux
from gradtrace.tasks.sandbox.wire import Encoded, decode, encode
from gradtrace.tasks.verification.channel import Channel

PAYLOAD = 3
CHANNEL = 4
PASSED, FAILED = b"1", b"0"


def main(packages: list[str]) -> None:
    # Without a process namespace of its own the candidate could write to our descriptors, through /proc.
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    with os.fdopen(PAYLOAD, "rb") as file:
        payload = json.load(file)
    verdicts = os.dup(1)
    os.dup2(2, 1)  # what tests print is no verdict
    sys.path += packages
    sys.setrecursionlimit(10_000)
    candidate = Candidate(Channel(socket.socket(fileno=CHANNEL)))
    for test in payload["tests"]:
        passed = run(payload["setup"], test, payload["entry_points"], candidate)
        os.write(verdicts, PASSED if passed else FAILED)
        if not passed and payload["stop"]:
            break
    os._exit(0)


def run(setup: str, test: str, entry_points: list[str], candidate: Candidate) -> bool:
    try:
        source = f"{setup}\n{test}\n"
        names = {*free_names(source), *entry_points} or outermost_call(source)
        namespace: dict[str, Any] = {name: Remote(candidate, {"name": name}) for name in names}
        namespace["__name__"] = "examiner"
        exec(compile(source, "<test>", "exec"), namespace)
    except BaseException:  # whatever ends a test early, it did not pass
        return False
    return True


def free_names(source: str) -> set[str]:
    """Names that the tests use and that neither they nor Python define: the candidate's.

    A builtin is never the candidate's, or redefining `set` would pass `set(f(x)) == set(y)`.
    """
    used: set[str] = set()
    bound = set(dir(builtins))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return used - bound


def outermost_call(source: str) -> set[str]:
    """The function of a test that names nothing but builtins: one task of MBPP wants a function called `sum`."""
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return {function.id for function in calls[:1] if isinstance(function, ast.Name)}


class CandidateError(Exception):
    """The candidate raised an exception of its own class."""


class Candidate:
    """The other side of the socket."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def ask(self, do: str, *arguments: Any, **named: Any) -> Any:
        self.channel.send(
            {
                "do": do,
                "arguments": [encode(value, self.handle) for value in arguments],
                "named": {name: encode(value, self.handle) for name, value in named.items()},
            }
        )
        reply = self.channel.receive()
        if "error" in reply:
            kind = getattr(builtins, str(reply["error"]), None)
            is_error = isinstance(kind, type) and issubclass(kind, Exception)
            raise (kind if is_error and kind is not None else CandidateError)(reply["message"])
        for value, after in zip(arguments[1:], reply["after"], strict=True):
            update(value, decode(after, self.resolve))
        return decode(reply["value"], self.resolve)

    def handle(self, value: Any) -> Encoded:
        if type(value) is Remote:
            return object.__getattribute__(value, "_handle")
        raise TypeError(f"{type(value).__name__} cannot be sent to the candidate")

    def resolve(self, handle: Encoded) -> Remote:
        return Remote(self, {"object": int(handle["object"])})


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
    """Stands for a name or an object of the candidate. It equals itself and nothing else: `==` is not asked there."""

    def __init__(self, candidate: Candidate, handle: Encoded) -> None:
        object.__setattr__(self, "_candidate", candidate)
        object.__setattr__(self, "_handle", handle)

    def _ask(self, do: str, *arguments: Any, **named: Any) -> Any:
        candidate: Candidate = object.__getattribute__(self, "_candidate")
        return candidate.ask(do, self, *arguments, **named)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._ask("call", *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return self._ask("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("set_item", key, value)

    def __contains__(self, value: Any) -> bool:
        return bool(self._ask("contains", value))

    def __len__(self) -> int:
        return int(self._ask("length"))

    def __bool__(self) -> bool:
        return bool(self._ask("truth"))

    def __str__(self) -> str:
        return str(self._ask("text"))

    def __repr__(self) -> str:
        return str(self._ask("repr"))

    def __next__(self) -> Any:
        return self._ask("next")

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ask("list"))
