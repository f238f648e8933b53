"""What registrations name is there, and listing them imports no torch."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gradtrace.instruments

FOLDER = Path(gradtrace.instruments.__file__).parent
NAMED = sorted(
    {path for file in FOLDER.glob("*/__init__.py") for path in re.findall(r'"([\w.]+:\w+)"', file.read_text())}
)


@pytest.mark.parametrize("path", NAMED)
def test_both_halves_of_an_instrument_can_be_found(path: str) -> None:
    """A wrong path would only show when the instrument is turned on."""
    assert isinstance(pkgutil.resolve_name(path), type)


def test_listing_instruments_imports_no_torch() -> None:
    assert len(NAMED) >= 11
    code = "import sys, gradtrace.instruments; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_no_instrument_is_named_in_a_host() -> None:
    """But for the keywords of TRL's `attach`, and in sentences that users read."""
    names = ("influence_trace", "entropy_trace", "entropy_probe", "tracin", "mismatch_every")
    for file in sorted((FOLDER.parent / "integrations").rglob("*.py")):
        if file.parts[-2:] == ("trl", "settings.py"):
            continue
        code = re.sub(r'""".*?"""|#[^\n]*', "", file.read_text(), flags=re.DOTALL)
        found = [name for name in names if re.search(rf"\b{name}\b", code)] + re.findall(
            r"instruments\.(?:influence|blame|tracin)\S*", code
        )
        assert not found, f"{file.name} names {found}"
