"""The order of the test files, and what the end of a test run says.

Files with slow tests come first, so that with several workers none of them ends last.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.browser import MISSING

# Nothing is fetched from a hub. Without a network, asking for a folder that is not there takes a minute.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow_files)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A test run without the browser's tests is not a whole one, and says so where it cannot be overlooked."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if MISSING in str(report.longrepr)]
    if skipped:
        terminalreporter.section("NOT EVERYTHING WAS TESTED", yellow=True)
        terminalreporter.write_line(f"{len(skipped)} tests did not run: {MISSING}")
