"""The command line starts with threads that sleep while they wait, set before torch reads it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import contextlib, os, sys
from gradtrace import cli
assert "torch" not in sys.modules
with contextlib.suppress(SystemExit):
    cli.main(["--version"])
print(os.environ["OMP_WAIT_POLICY"])
"""


@pytest.mark.parametrize("given, found", [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_waiting_threads_sleep_unless_the_user_says_otherwise(given: str | None, found: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    if given is not None:
        environment["OMP_WAIT_POLICY"] = given
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == found
