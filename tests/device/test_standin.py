"""Runs `cases.py` in a process of its own: once torch has a second device, it has it for every test of the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("cases.py")


@pytest.mark.slow
def test_every_case_on_the_stand_in_device() -> None:
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "-p", "no:xdist", str(CASES)]
    done = subprocess.run(command, cwd=CASES.parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "SKIPPED" not in done.stdout, done.stdout
