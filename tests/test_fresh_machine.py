"""What a newcomer is told can be done as it is told: commands that are printed, and a test run without a browser."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gradtrace.terminal import command
from gradtrace.training.terminal import closing_lines

ROOT = Path(__file__).parent.parent


def test_printed_commands_work_where_the_environment_is_not_activated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "gradtrace").write_text("#!/bin/sh\n")
    (binaries / "gradtrace").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(binaries / "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert command() == ".venv/bin/gradtrace"
    printed = closing_lines(Path("runs/demo"), [], finished=True, width=80)
    assert "  .venv/bin/gradtrace view runs/demo" in printed
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert command() == str(binaries / "gradtrace")
    monkeypatch.setenv("PATH", f"{binaries}:/usr/bin")
    assert command() == "gradtrace"


def test_without_a_browser_the_rest_runs_and_the_end_says_so() -> None:
    """On a machine without one: nothing is on the path, and Playwright has downloaded nothing."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/viewer/test_live_and_broken.py",
    ]
    nowhere = {**os.environ, "PATH": "/nonexistent", "PLAYWRIGHT_BROWSERS_PATH": "/nonexistent"}
    done = subprocess.run(command, cwd=ROOT, env=nowhere, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "NOT EVERYTHING WAS TESTED" in done.stdout and "the viewer's pages were not tested" in done.stdout


def test_the_front_page_names_the_extras_before_the_commands_that_need_them() -> None:
    text = (ROOT / "docs" / "index.md").read_text()
    needs = {"gradtrace data prepare": "hub", "engine=verl": "verl"}
    for words, extra in needs.items():
        before = text[: text.index(f"\n{words}") if f"\n{words}" in text else text.index(words)]
        assert re.search(rf"pip install.*\b{extra}\b|`{extra}` for", before, re.S), words


def test_makefile_gets_a_browser_before_the_tests() -> None:
    shown = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.index("scripts/get_browser") < shown.index("pytest -n ")


def test_security_page_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    named = set(re.findall(r"`((?:viewer/|trace/)?test_\w+)`", text))
    files = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(named) > 10 and {name.rpartition("/")[2] for name in named} <= files
    assert "docs/security.md" in (ROOT / "SECURITY.md").read_text()
