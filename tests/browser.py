"""The browser that the viewer's tests drive."""

from __future__ import annotations

import os
import shutil

SHELL = "chromium-headless-shell"
"""Chromium without the windows around a page, which cost more than the page: the tests take two thirds of the time."""
NAMES = (SHELL, "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = f"no browser: the viewer's pages were not tested (apt-get install {SHELL}, or playwright install chromium)"


def find_browser() -> str | None:
    """A Chromium of the system, or the one that Playwright has downloaded."""
    if found := next(filter(None, map(shutil.which, NAMES)), None):
        return found
    try:
        from playwright.sync_api import sync_playwright

        with sync_playwright() as playwright:
            path = playwright.chromium.executable_path
    except Exception:  # Playwright is not installed, or has no browser for this system
        return None
    return path if os.path.isfile(path) else None
