"""A step with two tiers of scores: the viewer says of every group which credit it has and what its scores mean."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from gradtrace import open_run
from gradtrace.instruments.influence import INFLUENCE_TRACE
from gradtrace.trace.columns import Credit
from gradtrace.trace.writer import TraceWriter
from gradtrace.viewer.group import group_payload, step_payload
from gradtrace.viewer.scores import ScoredStep, load_step
from gradtrace.viewer.vocabulary import load_vocabulary
from tests.viewer.conftest import write_run
from tests.viewer.serving import Watched, serving

META = {
    "credit": ["loss_term", "tail"],
    "pairwise_credit": "tail",
    "output_function": "training_loss",
    "target": "log_prob",
    "geometry": "optimizer",
    "optimizer": "AdamW",
    "contrastive_agg": "mean",
    "accepted_rejected_scope": "per_prompt",
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first scored group has loss terms, the others the tail alone; the third token of each response is clipped."""
    path = write_run(tmp_path_factory.mktemp("tiers") / "run", seed=5, groups=8, steps=1, tracin=False, probe=False)
    step = open_run(path).step(INFLUENCE_TRACE, 1)
    columns = {name: step[name] for name in step.columns if not name.startswith("influence_")}
    has_terms = step["group"] == step["group"].min()
    tokens_have_terms = np.repeat(has_terms, step["length"])
    terms = np.where(tokens_have_terms, step["influence_loss_term"], 0)
    places = np.concatenate([np.arange(length) for length in step["length"]])
    columns |= {
        "credit": np.where(has_terms, int(Credit.LOSS_TERM), int(Credit.TAIL)),
        "influence_tail": step["influence_position"],
        "influence_loss_term": terms,
        "influence_likelier": -terms,
        "no_step": places == 2,
    }
    with TraceWriter(path, INFLUENCE_TRACE, on_error="raise") as writer:
        writer.write(1, columns, META)
    return path


@pytest.fixture(scope="module")
def view(run_dir: Path) -> ScoredStep:
    found = load_step(open_run(run_dir), 1)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def groups(view: ScoredStep) -> tuple[int, int]:
    """(the group with loss terms, one with the tail alone)."""
    best = {g: scores[0] for g in range(view.n_groups) if (scores := view.group_scores(g))}
    return next(g for g, s in best.items() if s == "loss_term"), next(g for g, s in best.items() if s == "tail")


@pytest.fixture
def page(run_dir: Path, browser: Browser) -> Iterator[Page]:
    with serving([run_dir]) as address:
        watched = Watched(browser.new_page(viewport={"width": 1440, "height": 900}), address)
        watched.open("#/run")
        yield watched.page
        assert watched.errors == []
        watched.page.close()


def go(page: Page, address: str) -> None:
    page.goto(page.url.split("#")[0] + address)


def test_groups_say_which_credit_they_have(view: ScoredStep, run_dir: Path, groups: tuple[int, int]) -> None:
    words = load_vocabulary(open_run(run_dir))
    table = step_payload(view, words)
    assert table["common_credit"] == "tail"  # what all scored groups have can be compared
    assert [table["groups"][g]["credit"] for g in groups] == ["loss_term", "tail"]
    with_terms, tail = (group_payload(view, g, words) for g in groups)
    assert with_terms["credits"] == ["loss_term", "tail"] and with_terms["likelier"]
    assert tail["credits"] == ["tail"] and not tail["likelier"]


def test_a_group_shows_its_best_credit_and_names_the_score(page: Page, groups: tuple[int, int]) -> None:
    go(page, f"#/group?step=1&group={groups[0]}")
    unit = "loss term credit, change in the log-prob contrast per unit of learning rate"
    expect(page.locator(".legend.slot-1 .unit")).to_have_text(unit)
    sentence = page.locator(".explain .slot-1")
    expect(sentence).to_contain_text("Positive, bar above: training on this token helps the accepted responses")
    expect(sentence).to_contain_text("when a step follows its own term of the training loss, in AdamW’s geometry")
    go(page, f"#/group?step=1&group={groups[1]}")
    expect(page.locator(".legend.slot-1 .unit")).to_contain_text("tail credit")
    expect(page.get_by_role("radio", name="loss term")).to_be_disabled()


def test_the_switch_asks_what_making_a_token_likelier_would_do(page: Page, groups: tuple[int, int]) -> None:
    go(page, f"#/group?step=1&group={groups[0]}")
    strongest = page.locator(".row .slot-1 .t.p5").first
    place = strongest.evaluate("node => node.token")
    page.get_by_role("radio", name="making it likelier would do").click()
    expect(page.locator(".explain .slot-1")).to_contain_text("making this token likelier helps the accepted responses")
    mirrored = page.evaluate(
        "t => [...document.querySelectorAll('.slot-1 .t')].find(n => n.token === t).className", place
    )
    assert "n5" in mirrored  # the test's file has the opposite sign there
    page.reload()
    expect(page.locator(".legend.slot-1 .unit")).to_contain_text("if the token were likelier")
    page.keyboard.press("x")
    expect(page.locator(".legend.slot-1 .unit")).to_contain_text("loss term credit")
    go(page, f"#/group?step=1&group={groups[1]}")
    expect(page.get_by_role("radio", name="making it likelier would do")).to_be_hidden()


def test_clipped_tokens_are_marked(page: Page, groups: tuple[int, int], view: ScoredStep) -> None:
    go(page, f"#/group?step=1&group={groups[0]}")
    expect(page.locator(".row .slot-1 .t.clipped")).to_have_count(len(view.members(groups[0])))
    expect(page.locator(".explain .slot-1")).to_contain_text("training takes no step on this token")
    page.locator(".row .slot-1 .t.clipped").first.hover()
    expect(page.get_by_role("tooltip")).to_contain_text("clipped")


def test_the_step_page_compares_by_the_credit_that_all_groups_have(page: Page, view: ScoredStep) -> None:
    go(page, "#/step?step=1")
    expect(page.get_by_role("radio", name="tail")).to_have_attribute("aria-checked", "true")
    scored = sum(bool(view.group_scores(g)) for g in range(view.n_groups))
    expect(page.locator(".c-size .with-bar")).to_have_count(scored)
    expect(page.locator(".c-size small", has_text="loss term")).to_have_count(1)
    expect(page.locator(".c-size small", has_text="tail")).to_have_count(scored - 1)
    page.get_by_role("radio", name="loss term").click()
    expect(page.locator(".c-size .with-bar")).to_have_count(1)
    expect(page.locator(".c-map.reason", has_text="tail credit only")).to_have_count(scored - 1)
