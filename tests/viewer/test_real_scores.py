"""TracIn and the entropy probe of a real (tiny) run: what the instruments write is what the pages read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, expect

from gradtrace import open_run
from gradtrace.cli import main
from gradtrace.instruments.entropy_probe import ENTROPY_PROBE
from gradtrace.instruments.tracin import TRACIN, TracinReason
from gradtrace.viewer.pages import probe_payload, tracin_payload
from gradtrace.viewer.vocabulary import load_vocabulary
from tests.training.small import overrides
from tests.viewer.serving import Watched, serving


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    settings = overrides(
        folder,
        "trainer.name=real",
        "trainer.total_steps=2",
        "trainer.entropy_trace.enable=true",
        "trainer.tracin.enable=true",
        "trainer.tracin.val_batch_size=4",
        "trainer.tracin.diagnose_every=1",
        "trainer.entropy_probe.every=1",
        "trainer.entropy_probe.prompts=6",
    )
    assert main(["train", *settings]) == 0
    return folder / "runs" / "real"


def test_scores_and_validation_set_of_a_real_step(real: Path) -> None:
    run = open_run(real)
    step = run.step(TRACIN, 2)
    page = tracin_payload(step, load_vocabulary(run), {})
    assert len(page["candidates"]) == 4 * 3 and len({row["group"] for row in page["validation"]}) == 4
    assert all(np.isfinite(row["score"]) for row in page["candidates"])
    kept = [row for row in page["candidates"] if row["kept"]]
    last = run.metrics()[0][-1]
    assert len(kept) == last["tracin/selected"] == last["perf/trained_responses"] - len(page["validation"])
    assert last["perf/generated_responses"] == 4 * 3 + 4 * 3 + 6  # rollout, TracIn's validation, the probe's E
    assert (step["reason"] == int(TracinReason.VALIDATION)).sum() == len(page["validation"])


def test_parts_of_a_real_probe_sum_to_its_prediction(real: Path) -> None:
    run = open_run(real)
    page = probe_payload(run.step(ENTROPY_PROBE, 2), load_vocabulary(run))
    assert not any(part["name"] == "not attributed" for part in page["parts"])
    total = sum(part["value"] for part in page["parts"])
    assert total == pytest.approx(page["meta"]["delta_h_predicted"], rel=1e-3)
    assert len(page["evaluation"]) == 6 and page["update"]


def test_the_pages_of_a_real_run_open(real: Path, browser: Browser) -> None:
    with serving([real]) as address:
        watched = Watched(browser.new_page(viewport={"width": 1280, "height": 900}), address)
        page = watched.open("#/tracin?step=2")
        expect(page.locator(".responses tbody tr.opens")).to_have_count(12)
        page.locator(".responses tbody tr.opens").first.click()
        expect(page.locator(".opened .t").first).to_be_visible()
        expect(
            page.locator("[data-chart='tracin-norms'] path.line").first
        ).to_be_attached()  # a level line has no height
        page.get_by_role("link", name="Entropy probe").click()
        expect(page.locator("h1")).to_have_text("Entropy probe, step 2")
        expect(page.locator(".probe-row .map .t").first).to_be_visible()
        expect(page.locator("[data-chart='entropy-change'] .chart-band")).to_have_count(2)
        page.close()
        assert watched.errors == [] and watched.foreign_requests == []
