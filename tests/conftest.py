"""The order of the test files, and what the end of a test run says."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import MISSING

# Nothing is fetched from a hub. Without a network, asking for a folder that is not there takes a minute.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

GARBAGE = 10_000
"""Objects that tests make and do not drop before the garbage collector looks through the young ones."""

LONGEST = (
    "e2e/test_demo.py",
    "integrations/verl/test_run.py",
    "integrations/verl/test_engine.py",
    "tasks/test_sandbox.py",
    "integrations/verl/test_tools_run.py",
    "viewer/test_pages.py",
    "trace/test_crash.py",
    "e2e/test_documented_commands.py",
    "tasks/test_math_answers.py",
    "viewer/test_accessible.py",
    "integrations/test_trl_two_processes.py",
    "device/test_standin.py",
    "integrations/test_trl.py",
    "viewer/test_score_pages.py",
    "viewer/test_live_and_broken.py",
    "attribution/test_distributed.py",
)
"""Whole files go to workers. The longest begin first and short ones fill up, so that the workers end together."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {Path(__file__).parent / name: number for number, name in enumerate(LONGEST)}
    slow = {item.path: len(place) for item in items if item.get_closest_marker("slow")}
    rank = slow | place
    items.sort(key=lambda item: rank.get(item.path, len(place) + 1))


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Test files, and with them torch and transformers, are imported here. The million objects of packages stay until
    the end, so the garbage collector leaves them alone; looking through them took 15 % of the time of tests that train.
    """
    gc.disable()
    yield
    gc.freeze()
    gc.set_threshold(GARBAGE, *gc.get_threshold()[1:])
    gc.enable()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A test run without the browser's tests is not a whole one, and says so where it cannot be overlooked."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if MISSING in str(report.longrepr)]
    if skipped:
        terminalreporter.section("NOT EVERYTHING WAS TESTED", yellow=True)
        terminalreporter.write_line(f"{len(skipped)} tests did not run: {MISSING}")
