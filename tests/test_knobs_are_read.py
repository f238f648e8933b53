"""A knob that nothing reads is a promise that nobody keeps: every key of the configuration is read by some code."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

import gradtrace
from gradtrace.commands.probe.config import ProbeConfig
from gradtrace.config.keys import schema_keys
from gradtrace.config.root import Config

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
}
"""Names that other objects have as well: from which expressions they have to be read."""


def reads() -> dict[str, set[str]]:
    """Attribute → the expressions that it is read from, in all code but the declarations; and in `validate` of these,
    where a key may only be there to be refused with another."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in SOURCE.rglob("*.py"):
        if str(file.relative_to(SOURCE)).startswith(DEFINED_IN):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found[node.attr].add(ast.unparse(node.value))
    return found


READS = reads()


def leaves(schema: type) -> list[str]:
    keys = list(schema_keys(schema))
    return [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]


@pytest.mark.parametrize("key", [*leaves(Config), *leaves(ProbeConfig)])
def test_a_key_is_read_where_something_is_done(key: str) -> None:
    section, _, name = key.rpartition(".")
    owners = READS.get(name, set())
    assert owners, f"{key} is declared and nothing reads it: use it, or remove it"
    wanted = OWNERS.get(name)
    if wanted is not None:
        own = section.rsplit(".")[-1]
        assert any(re.search(rf"\b({own}|{'|'.join(wanted)})$", owner) for owner in owners), (
            key,
            sorted(owners),
        )
