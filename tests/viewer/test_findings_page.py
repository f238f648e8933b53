"""The findings page and the blame page of a real run: sentences, culprits that lead to their group, shares."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from gradtrace import open_run
from gradtrace.commands.report import make_report
from gradtrace.trace.files import JsonLines
from gradtrace.training.run import train
from gradtrace.viewer.scores import load_step
from tests.training import small
from tests.viewer.serving import Watched, serving

FINDING = {
    "detector": "gradient_spike",
    "step": 2,
    "sentence": "The gradient norm jumped <b>to 50</b>.",
    "confidence": 0.8,
    "evidence": {"grad_norm": 50.0},
    "culprits": [{"text": "7", "group": 1, "row": 4, "position": 2, "share": 0.9}],
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("found")
    more = (
        "trainer.blame.enable=true",
        "trainer.blame.write_every=1",
        "trainer.entropy_trace.enable=true",
        "trainer.validation.every=0",
    )
    path = train(small.config(folder, "trainer.total_steps=2", "trainer.findings.enable=false", *more)).run_dir
    JsonLines(path / "findings.jsonl").append(FINDING)
    return path


def test_findings_are_listed_with_links_to_their_culprits(run_dir: Path, browser: Browser) -> None:
    with serving([run_dir]) as address:
        watched = Watched(browser.new_page(viewport={"width": 1440, "height": 900}), address)
        page = watched.open("#/run")
        page.get_by_role("link", name="Findings 1").click()
        expect(page.locator("h1")).to_have_text("Findings")
        expect(page.locator(".finding p")).to_have_text(FINDING["sentence"])  # as text, whatever it holds
        expect(page.locator(".sure")).to_have_text("80% sure")
        page.get_by_role("link", name="prompt 1, row 4, token 2").click()
        page.wait_for_url("**/#/group?**step=2**group=1**")
        assert watched.errors == [] and watched.foreign_requests == []
        page.close()


def test_a_report_holds_the_groups_that_findings_name(run_dir: Path) -> None:
    report = make_report([run_dir], max_groups=0)
    assert (report.steps, report.groups) == (1, 1)
    assert '"runs/0/steps/2/groups/1"' in report.page and '"runs/0/findings"' in report.page


def test_the_blame_page_says_who_made_the_gradient_largest_share_first(run_dir: Path, browser: Browser) -> None:
    step = open_run(run_dir).step("blame", 2)
    with serving([run_dir]) as address:
        watched = Watched(browser.new_page(viewport={"width": 1440, "height": 900}), address)
        page = watched.open("#/blame?step=2")
        expect(page.locator(".blame-report > p")).to_contain_text("Step 2: the gradient of 2 optimizer step(s)")
        expect(page.locator(".blame-prompts tr")).to_have_count(4)
        first = page.locator("tr.opens").first
        assert first.get_attribute("data-response") == str(int(step["grad_share"].argmax()))
        assert watched.errors == [] and watched.foreign_requests == []
        page.close()


def test_the_blame_page_fits_on_a_phone(run_dir: Path, browser: Browser) -> None:
    with serving([run_dir]) as address:
        watched = Watched(browser.new_page(viewport={"width": 390, "height": 844}), address)
        page = watched.open("#/blame?step=2")
        expect(page.locator("tr.opens").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        cut = "cells => cells.filter(cell => cell.offsetWidth && cell.scrollWidth > cell.offsetWidth).length"
        assert page.locator("tr.opens td.number").evaluate_all(cut) == 0
        outside = """texts => texts.filter(text => text.getBoundingClientRect().right >
            text.closest("td").getBoundingClientRect().right).length"""
        assert page.locator("td.c-text .row-opener").evaluate_all(outside) == 0  # else the cell shows "…" alone
        page.close()


def test_a_report_holds_findings(run_dir: Path) -> None:
    page = make_report([run_dir]).page
    data = json.loads(page.split('id="gradtrace-report">')[1].split("</script>")[0])
    assert data["json"]["runs/0/findings"]["findings"][0]["detector"] == "gradient_spike"


def test_a_group_shows_the_gradient_shares_of_blame_and_says_why_others_are_missing(
    run_dir: Path, browser: Browser
) -> None:
    run = open_run(run_dir)
    blame, view = run.step("blame", 2), load_step(run, 2)
    assert view is not None
    shares = view.column("token_grad_share")
    assert shares is not None
    for r, theirs in enumerate(view.responses_in("blame").tolist()):
        assert shares[view.tokens(r)].tolist() == blame.tokens(theirs)["token_grad_share"].tolist()
    with serving([run_dir]) as address:
        watched = Watched(browser.new_page(viewport={"width": 1440, "height": 900}), address)
        page = watched.open("#/group?step=2&group=0&view=side&left=token_grad_share&right=no_step")
        expect(page.locator(".explain .slot-0")).to_contain_text("All shares of a step add up to 1")
        expect(page.locator(".explain .slot-1")).to_contain_text("hold no clip mask")
        expect(page.locator(".row .slot-0 .t:is([class*=' p'], [class*=' n'])").first).to_be_visible()
        assert watched.errors == []
        page.close()
