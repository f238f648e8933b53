"""Runs in a jail of its own: the tests, with the candidate's names standing for calls into the other jail.

`assert f(3) == 9` runs here as written, with this process's `assert`, `==` and builtins. `f` is a stand-in that asks
the candidate's process for a value. The right value never leaves this process, and only data enters it.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import socket
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

from gradtrace.tasks.sandbox import CHANNEL, PAYLOAD
from gradtrace.tasks.sandbox.names import resolve
from gradtrace.tasks.sandbox.wire import Encoded, decode, encode
from gradtrace.tasks.verification.channel import Channel

PASSED, FAILED = b"1", b"0"


def main(packages: list[str]) -> None:
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
        names, modules = resolve(source, entry_points)
        theirs = {name: Remote(candidate, {"name": name}) for name in names}
        ours = {name: importlib.import_module(module) for name, module in modules.items()}
        namespace: dict[str, Any] = {"__name__": "examiner", **ours, **theirs}
        exec(compile(setup, "<setup>", "exec"), namespace)
        namespace.update(theirs)  # a prompt's code may have a stub of the function that is asked for
        exec(compile(test, "<test>", "exec"), namespace)
    except BaseException:  # whatever ends a test early, it did not pass
        return False
    return True


class CandidateError(Exception):
    """The candidate raised an exception of its own class, or one that says something about loops to Python."""


END_OF_LOOP = (StopIteration, StopAsyncIteration)
"""Raised by a function, `map` would take them for the end of its arguments."""


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
