"""A real viewer server in a thread, and real Chromium, for tests."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

from gradtrace.commands.view import bind
from gradtrace.viewer.catalog import RunCatalog
from gradtrace.viewer.counterfactual import Sampling
from gradtrace.viewer.security import Access, access_for
from gradtrace.viewer.server import create_app
from tests.browser import MISSING, find_browser

CHROMIUM_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@contextlib.contextmanager
def serving(
    runs: list[Path],
    runs_dir: Path | None = None,
    access: Access | None = None,
    sampling: Sampling | None = None,
) -> Iterator[str]:
    """The address of a running viewer, without a slash at its end."""
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    access = access or access_for("127.0.0.1", port, None, posts=sampling is not None)
    app = create_app(RunCatalog(runs, runs_dir), access, sampling)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        pytest.skip(MISSING)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=CHROMIUM_FLAGS)
        yield browser
        browser.close()


class Watched:
    """A page whose errors, refused resources and requests to elsewhere are noted."""

    def __init__(self, page: Page, origin: str) -> None:
        self.page = page
        self.origin = origin
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._console)
        page.on("request", lambda request: self.requests.append(request.url))

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def open(self, hash_: str) -> Page:
        self.page.goto(f"{self.origin}/{hash_}")
        return self.page

    @property
    def foreign_requests(self) -> list[str]:
        return [url for url in self.requests if not url.startswith((self.origin, "data:", "about:"))]
