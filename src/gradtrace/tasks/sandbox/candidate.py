"""Runs in the jail: the model's code, as a script or as a set of functions that the examiner calls.

Nothing here is trusted, since the code shares this process: it can only ever answer with values.
"""

from __future__ import annotations

import importlib
import json
import operator
import os
import socket
import sys
import types
from collections.abc import Callable
from typing import Any

from gradtrace.tasks.sandbox import CHANNEL, PAYLOAD
from gradtrace.tasks.verification.channel import Channel, Encoded, Message, decode, encode

OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *arguments, **named: function(*arguments, **named),
    "get": getattr,
    "set": setattr,
    "item": operator.getitem,
    "set_item": operator.setitem,
    "length": len,
    "text": str,
    "repr": repr,
    "next": next,
    "list": list,
}


def main(packages: list[str]) -> None:
    with os.fdopen(PAYLOAD, "rb") as file:
        payload = json.load(file)
    sys.path[0:1] = []
    sys.path += packages
    sys.setrecursionlimit(10_000)
    if payload["mode"] == "script":
        module = new_module("__main__")
        exec(compile(payload["code"], "<candidate>", "exec"), module.__dict__)
    else:
        channel = Channel(socket.socket(fileno=CHANNEL))
        request = channel.receive()  # the examiner has closed its door before the code runs
        module = new_module("candidate")
        if payload["mode"] == "functions":
            module.__dict__.update(usual_names(payload["code"], payload["entry_points"]))
        exec(compile(payload["code"], "<candidate>", "exec"), module.__dict__)
        Servant(module, channel).serve(request)


USUAL = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "typing"),
)
"""Modules that data sets with `fn_name` take for imported, with all that they define."""


def usual_names(code: str, asked_for: list[str]) -> dict[str, Any]:
    """What a program uses of the usual modules without importing it, such as `List`; never the function to be written:
    `operator` has an `add`."""
    from gradtrace.tasks.sandbox.examiner import free_names

    missing = free_names(code) - set(asked_for)
    found: dict[str, Any] = {}
    for module in map(importlib.import_module, USUAL) if missing else ():
        public = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
        found.update({name: getattr(module, name) for name in public})
    modules = {name: sys.modules[name] for name in USUAL if name in sys.modules}  # `copy` is the module
    return {name: value for name, value in (found | modules).items() if name in missing}


def new_module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    sys.modules[name] = module
    return module


class Servant:
    """Does what the examiner asks with the names and objects of the candidate."""

    def __init__(self, module: types.ModuleType, channel: Channel) -> None:
        self.module = module
        self.channel = channel
        self.objects: list[Any] = []

    def serve(self, request: Message) -> None:
        """Answer `request`, and then all others."""
        while True:
            try:
                reply = self.answer(request)
            except Exception as error:
                reply = {"error": type(error).__name__, "message": str(error)[:500]}
            self.channel.send(reply)
            request = self.channel.receive()

    def answer(self, request: Message) -> Message:
        arguments = [decode(value, self.resolve) for value in request["arguments"]]
        named = {name: decode(value, self.resolve) for name, value in request["named"].items()}
        result = OPERATIONS[request["do"]](*arguments, **named)
        # What the call did to its arguments (sorting a list in place) belongs to the result.
        after = [self.encode(value) for value in arguments[1:]]
        return {"value": self.encode(result), "after": after}

    def encode(self, value: Any) -> Encoded:
        return encode(value, self.handle)

    def handle(self, value: Any) -> Encoded:
        self.objects.append(value)
        # An instance of Python's own classes (the match of a regular expression) is true as such.
        return {"object": len(self.objects) - 1, "true": type(value).__module__ != self.module.__name__}

    def resolve(self, handle: Encoded) -> Any:
        if "name" in handle:
            if handle["name"] not in self.module.__dict__:
                raise NameError(f"name {handle['name']!r} is not defined")
            return self.module.__dict__[handle["name"]]
        return self.objects[handle["object"]]
