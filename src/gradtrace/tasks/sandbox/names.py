"""Which names in a test are the candidate's, and which the examiner's.

Only entry points are the candidate's. Everything else a test names is defined by the test, a builtin or a module that
the examiner imports. What is left over could be a helper that judges (`close(f(3), 9)`), and a candidate that defines
it would be its own judge: such a test is refused.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import symtable
import sys
from collections.abc import Iterable

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
        return outermost_call(tree), modules
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
    return used - defined - set(dir(builtins)) - {"__name__", "__file__"}


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
