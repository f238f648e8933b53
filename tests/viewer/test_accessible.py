"""axe-core finds nothing to complain about on any page of the viewer, light, dark or on a small screen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from gradtrace.trace.files import JsonLines
from gradtrace.training.run import train
from tests.training import small
from tests.viewer.conftest import write_run
from tests.viewer.serving import Watched, serving
from tests.viewer.test_ablation_page import table
from tests.viewer.test_counterfactual_page import measure
from tests.viewer.test_findings_page import FINDING

AXE = Path(__file__).parents[2] / "node_modules" / "axe-core" / "axe.min.js"
PAGES = {
    "run": ("run", "chains", ".chart path.line"),
    "run with another laid over it": ("run?with=chains-b", "chains", ".chart path.line"),
    "step": ("step?step=2", "chains", "tbody tr"),
    "group of chains": ("group?step=1&group=0", "chains", ".row .t"),
    "a token of it": ("group?step=1&group=0&sel=0.2", "chains", ".dock .bar-column"),
    "ΔV of it": ("group?step=1&group=0&right=delta_v", "chains", ".value-curve"),
    "group of prose": ("group?step=1&group=0", "prose", ".row .t"),
    "tokens": ("tokens?step=2", "chains", "td.c-count"),
    "tracin": ("tracin?step=2", "chains", ".responses tr.opens"),
    "probe": ("probe?step=2", "chains", ".probe-row .t"),
    "findings": ("findings", "real", ".finding"),
    "blame": ("blame?step=2", "real", ".responses tr.opens"),
    "ablation": ("ablation", "ablation", ".ablation-table td"),
    "harmful tokens": ("find?what=harm", "chains", "tbody tr"),
    "a prompt over time": ("find?what=prompt&step=1&group=0", "chains", ".history section"),
    "two responses compared": ("group?step=1&group=0&diff=0.1", "chains", ".diff-line"),
    "reading": ("group?step=1&group=0&view=read", "prose", ".reading .rich"),
    "a step that was not traced": ("step?step=77", "chains", ".empty"),
}


@pytest.fixture(scope="module")
def axe() -> str:
    if not AXE.is_file():
        pytest.skip(
            "axe-core is not there, so the pages' accessibility was not tested: run `npm install --no-package-lock` "
            "(make lint does, where npm and its registry are at hand)"
        )
    return AXE.read_text()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A run of chains with counterfactual values, one of prose, a real one with findings and blame, and an ablation."""
    folder = tmp_path_factory.mktemp("accessible")
    measure(write_run(folder / "chains", seed=1, groups=6, steps=2))
    write_run(folder / "chains-b", seed=2, groups=3, steps=2)
    write_run(folder / "prose", "prose", seed=3, groups=2, responses=4, steps=1)
    blame = ("trainer.blame.enable=true", "trainer.blame.write_every=1", "trainer.entropy_trace.enable=true")
    settings = small.config(folder, "trainer.total_steps=2", "trainer.validation.every=0", *blame)
    trained = train(settings).run_dir.rename(folder / "real")
    JsonLines(trained / "findings.jsonl").append(FINDING)
    (folder / "ablation").mkdir()
    (folder / "ablation" / "ablation.json").write_text(json.dumps(table()))
    with serving([folder / "chains"], folder) as origin:
        yield origin


def complaints(page: Page, *rules: str) -> list[str]:
    """What axe finds by these rules, or by all: the rule, how often, and the first place."""
    chosen = {"resultTypes": ["violations"], **({"runOnly": list(rules)} if rules else {})}
    found = page.evaluate("async (chosen) => (await axe.run(document, chosen)).violations", chosen)
    first = [(rule["id"], len(rule["nodes"]), rule["nodes"][0]) for rule in found]
    return [f"{name} ×{n}: {node['html'][:160]} {node['failureSummary'][:300]}" for name, n, node in first]


def test_axe_finds_nothing(browser: Browser, address: str, axe: str) -> None:
    """All rules on a wide and on a small screen; of the dark colours, their contrast."""
    context = browser.new_context(color_scheme="light")
    wrong = []
    for name, (hash_, run, there) in PAGES.items():
        watched = Watched(context.new_page(), address)
        page = watched.page
        page.set_viewport_size({"width": 1440, "height": 900})
        watched.open(f"#/{hash_}{'&' if '?' in hash_ else '?'}run={run}")
        expect(page.locator(there).first).to_be_attached()
        page.evaluate(axe)
        found = complaints(page)
        if name == "run":  # what lies over a page: the menu of runs, and the help
            page.locator(".run-picker > button").click()
            found += complaints(page)
            page.keyboard.press("Escape")
            page.keyboard.press("?")
            expect(page.locator("dialog")).to_be_visible()
            found += complaints(page)
            page.keyboard.press("Escape")
        page.set_viewport_size({"width": 390, "height": 844})
        found += [f"narrow: {line}" for line in complaints(page)]
        page.evaluate("document.documentElement.dataset.theme = 'dark'")
        found += [f"dark: {line}" for line in complaints(page, "color-contrast")]
        wrong += [f"{name}: {line}" for line in found]
        assert watched.errors == []
        page.close()
    context.close()
    assert wrong == [], "\n".join(wrong)
