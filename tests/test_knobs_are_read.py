"""A knob that nothing reads is a promise that nobody keeps: every key of the configuration is read by some code."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections import defaultdict
from pathlib import Path

import pytest

import gradtrace
from gradtrace.commands.probe.config import ProbeConfig
from gradtrace.config.keys import schema_keys
from gradtrace.config.root import Config
from gradtrace.instruments.influence import InfluenceTraceConfig

SOURCE = Path(gradtrace.__file__).parent
DEFINED_IN = (
    "config/",
    *(f"{owner}/settings.py" for owner in ("algorithms", "policy", "rollout", "tasks")),
    "attribution/config.py",
    "probe/config.py",
)
"""Where keys are declared and checked, which is not yet a use."""
OWNERS = {
    "name": ("task", "reward", "trainer", "wandb", "tracker", "settings"),
    "path": ("model", "reference", "reward"),
    "scope": ("config",),
    "about": ("config",),
}
"""Names that other objects have as well: from which expressions they have to be read."""
READ_AS = {"accepted_rejected_scope": "scope", "target": "about"}
"""Keys that may be `auto` → the property that says what this means."""


def reads() -> dict[str, set[str]]:
    """Attribute → the expressions that it is read from, in all code but the declarations and their checks. What a
    property of a declaration reads counts where other code reads the property."""
    found: dict[str, set[str]] = defaultdict(set)
    properties: dict[str, list[ast.Attribute]] = {}
    for file in SOURCE.rglob("*.py"):
        tree = ast.parse(file.read_text())
        if str(file.relative_to(SOURCE)).startswith(DEFINED_IN):
            properties |= {name: loads(body) for name, body in properties_of(tree)}
            continue
        for node in loads(tree):
            found[node.attr].add(ast.unparse(node.value))
    for name, inside in properties.items():
        for node in inside if name in found else ():
            found[node.attr].add(name)
    return found


def loads(tree: ast.AST) -> list[ast.Attribute]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)]


def properties_of(tree: ast.AST) -> list[tuple[str, ast.FunctionDef]]:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [(one.name, one) for one in functions if any(ast.unparse(d) == "property" for d in one.decorator_list)]


READS = reads()


def leaves(schema: type) -> list[str]:
    keys = list(schema_keys(schema))
    return [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]


@pytest.mark.parametrize("key", [*leaves(Config), *leaves(ProbeConfig)])
def test_a_key_is_read_where_something_is_done(key: str) -> None:
    section, _, name = key.rpartition(".")
    name = READ_AS.get(name, name)
    owners = READS.get(name, set())
    assert owners, f"{key} is declared and nothing reads it: use it, or remove it"
    wanted = OWNERS.get(name)
    if wanted is not None:
        own = section.rsplit(".")[-1]
        assert any(re.search(rf"\b({own}|{'|'.join(wanted)})$", owner) for owner in owners), (
            key,
            sorted(owners),
        )


def test_the_page_of_knobs_says_where_each_knob_of_the_influence_trace_shows() -> None:
    page = (Path(__file__).parent.parent / "docs" / "knobs.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    shown = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(shown) == sorted(field.name for field in dataclasses.fields(InfluenceTraceConfig))
