"""What registrations name is there, and listing them imports no torch."""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradtrace.instruments
from gradtrace.instruments import registry

FOLDER = Path(gradtrace.instruments.__file__).parent
NAMED = sorted(
    {path for file in FOLDER.glob("*/__init__.py") for path in re.findall(r'"([\w.]+:\w+)"', file.read_text())}
)


@pytest.mark.parametrize("path", NAMED)
def test_both_halves_of_an_instrument_can_be_found(path: str) -> None:
    """A wrong path would only show when the instrument is turned on."""
    assert callable(pkgutil.resolve_name(path))


def test_listing_instruments_imports_no_torch() -> None:
    assert len(NAMED) >= 11
    code = "import sys, gradtrace.instruments; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_no_instrument_is_named_in_a_host() -> None:
    """But for the keywords of TRL's `attach`, and in sentences that users read. Detectors watch a run from outside the
    contract."""
    names = {name for one in registry.instruments().values() for name in (one.name, one.key)}
    folders = {file.parent.name for file in FOLDER.glob("*/__init__.py")} - {"findings"}
    assert {"blame", "influence_trace", "mismatch_every"} <= names and {"blame", "influence", "verify"} <= folders
    for file in sorted((FOLDER.parent / "integrations").rglob("*.py")):
        if file.parts[-2:] == ("trl", "settings.py"):
            continue
        said = {tuple(word.split(".")) for word in words_of(file)}
        imported = {parts for parts in said if parts[:2] == ("gradtrace", "instruments") and folders & {*parts[2:3]}}
        named = {parts for parts in said if names & {*parts}}
        assert not imported | named, f"{file.name} names an instrument: {imported | named}"


def words_of(file: Path) -> Iterator[str]:
    """The names in a module's code, and its strings of one word, which may be names, too."""
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.arg(arg=word) | ast.alias(name=word):
                yield word
            case ast.ImportFrom(module=str(word)):
                yield from (f"{word}.{alias.name}" for alias in node.names)
            case ast.keyword(arg=str(word)) | ast.Constant(value=str(word)) if re.fullmatch(r"[\w.]+", word):
                yield word
            case ast.FunctionDef(name=word) | ast.ClassDef(name=word):
                yield word
