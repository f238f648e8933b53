"""In SQLite's manner: a fault at the first file operation of a run, then at the second, … until the run completes.

Whatever happens, the reader sees the state before the interrupted action or after it, and reports no damage; the
run can be resumed; and a fault that is not the end of the process is reported and does not end it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

MEMORY = "/dev/shm"
"""The faults are made in the process, so the disk behind it does not matter: one in memory makes files in less time."""


@pytest.mark.parametrize(
    ("mode", "fsync"),
    [
        ("kill_before", "no fsync"),
        ("kill_torn", "no fsync"),
        pytest.param("kill_torn", "fsync", marks=pytest.mark.slow),
        pytest.param("power", "fsync", marks=pytest.mark.slow),
        pytest.param("enospc", "fsync", marks=pytest.mark.slow),
        ("eio", "no fsync"),
        ("full", "no fsync"),
        ("short", "no fsync"),
    ],
)
def test_reader_sees_old_or_new_state_after_a_fault_anywhere(mode: str, fsync: str) -> None:
    driver = Path(__file__).with_name("crash_driver.py")
    with tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as folder:
        result = subprocess.run(
            [sys.executable, str(driver), mode, fsync, folder], capture_output=True, text=True, check=False
        )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["violations"] == []
    assert report["tries"] > 100, "the scenario has more file operations than that: the faults did not reach them"
