"""From `gradtrace train` to a token in the browser: a real run, read by the viewer as a user would."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from gradtrace import open_run
from gradtrace.cli import main
from tests.training import small
from tests.viewer.serving import Watched, chromium, serving

TRACED = (
    "trainer.entropy_trace.enable=true",
    "trainer.influence_trace.enable=true",
    "trainer.influence_trace.projection_dim_factor=0",
    "trainer.influence_trace.credit=both",
    "trainer.influence_trace.contrastive_agg=mean",
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    assert main(["train", *small.overrides(folder, *TRACED)]) == 0
    return folder / "runs" / "demo"


@pytest.fixture(scope="module")
def viewer(run_dir: Path) -> Iterator[Watched]:
    with serving([run_dir]) as origin, chromium() as browser:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        yield Watched(page, origin)


def test_the_run_page_draws_the_metrics_of_training(viewer: Watched, run_dir: Path) -> None:
    page = viewer.open("#/run")
    expect(page.locator("h1")).to_have_text("demo")
    expect(page.locator("[data-chart=reward] path.line").first).to_be_visible()
    assert viewer.errors == []


def test_a_token_of_a_scored_group_explains_its_score(viewer: Watched, run_dir: Path) -> None:
    step = open_run(run_dir).step("influence_trace", 1)
    group = int(step["group"][0])
    row = int(step["row"][0])
    page = viewer.open(f"#/group?step=1&group={group}")
    cell = page.locator(f".row[aria-label^='Response r{row % 3},'] .slot-1 .t").first
    cell.click()
    expect(page.locator(".bar-column")).to_have_count(3)
    shown = (page.locator(".sum-table dd.total").text_content() or "").replace("−", "-")
    stored = float(step["influence_position"][int(step["token_offsets"][0])])
    assert float(shown) == pytest.approx(stored, rel=0.02, abs=1e-3)
    assert viewer.errors == []


def test_the_report_of_a_real_run_opens_from_a_file(viewer: Watched, run_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    assert main(["report", str(run_dir), "-o", str(target)]) == 0
    page = viewer.page
    page.goto(target.as_uri())
    expect(page.locator("h1")).to_have_text("demo")
    assert viewer.errors == []
