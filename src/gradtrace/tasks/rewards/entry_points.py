"""Which functions of a programming problem are the model's, and which the tests'.

A name that the tests use and do not define is looked for, in this order: in the code that the prompt shows (a helper;
a stub without a body is what the model is to write), among what the reference solution (`code`) defines. A name that
is still open is an error of the data: a model that defined it would judge itself.
"""

from __future__ import annotations

import ast
import functools
import re

from gradtrace.tasks.sandbox.names import UnresolvedError, free_names, resolve

DEFINITION = re.compile(r"(?:async def|def|class) (\w+)")
IMPORT = re.compile(r"(?:import|from) \w")


@functools.lru_cache(maxsize=1024)
def completed(
    setup: str, tests: tuple[str, ...], declared: tuple[str, ...], prompt: str, reference: str
) -> tuple[str, tuple[str, ...]]:
    """(setup with the prompt's helpers, entry points), with which every name in the tests has one owner.

    Raises UnresolvedError, and SyntaxError or ValueError if the tests are no Python.
    """
    helpers, stubs = definitions(prompt)
    names = set(declared)
    for test in tests:
        while True:
            try:
                resolve(f"{setup}\n{test}\n", names)
                break
            except UnresolvedError as error:
                shown = [name for name in error.names if name in helpers]
                if shown:
                    setup = "\n".join([helpers.pop(name) for name in shown] + [setup])
                    continue
                free = free_names(f"{setup}\n{test}\n")
                more = (free & stubs or free & defined_in(reference)) - names
                if declared or not more:
                    raise
                names |= more
    return setup, tuple(sorted(names))


def definitions(prompt: str) -> tuple[dict[str, str], set[str]]:
    """({name: source with the prompt's imports} of what the prompt defines, names of what it leaves to be written)."""
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


def defined_in(source: str) -> set[str]:
    if not is_python(source):
        return set()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.parse(source).body if isinstance(node, kinds)}


def is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
