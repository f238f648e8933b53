from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.viewer.sample import SampleRun
from tests.viewer.serving import Watched, chromium, serving

expect.set_options(timeout=30_000)  # a machine under load is slow, not wrong


def write_run(path: Path, task: str = "arithmetic", steps: int = 3, **options: object) -> Path:
    run = SampleRun(path, task, total_steps=steps, **options)  # type: ignore[arg-type]
    for step in range(1, steps + 1):
        run.write_step(step)
    run.finish()
    return path


@pytest.fixture(scope="session")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of chains to compare, one of prose."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "chains", seed=1, groups=12, steps=5)
    write_run(folder / "chains-b", seed=2, groups=12, steps=4)
    write_run(folder / "prose", "prose", seed=3, groups=4, responses=6, steps=2)
    return folder


@pytest.fixture(scope="session")
def origin(runs_dir: Path) -> Iterator[str]:
    with serving([runs_dir / "chains"], runs_dir) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Not for the whole session: Playwright keeps an event loop running, which other modules' asyncio would meet."""
    with chromium() as running:
        yield running


@pytest.fixture
def viewer(browser: Browser, origin: str) -> Iterator[Watched]:
    """A fresh page. The test fails if the page logged an error or asked another machine for anything."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme="light")
    context.grant_permissions(["clipboard-read", "clipboard-write"], origin=origin)
    context.set_default_timeout(30_000)
    watched = Watched(context.new_page(), origin)
    yield watched
    errors, foreign = watched.errors, watched.foreign_requests
    context.close()
    assert errors == []
    assert foreign == []
