"""Scores in nats, what a step did to a group, and scores of captured factors: the viewer names each and mixes none."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from gradtrace import open_run
from gradtrace.instruments.influence import INFLUENCE_TRACE
from gradtrace.instruments.influence.books import Books, Nats, books_of, remarks
from gradtrace.trace.table import StepTable
from gradtrace.trace.writer import TraceWriter
from gradtrace.viewer.group import group_payload, step_payload
from gradtrace.viewer.scores import ScoredStep, load_step
from gradtrace.viewer.vocabulary import load_vocabulary
from tests.viewer.conftest import write_run
from tests.viewer.serving import Watched, serving

SMALL = {"groups": 8, "steps": 1, "tracin": False, "probe": False}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that differ in their scores; in `clipped` the third token of each response is."""
    folder = tmp_path_factory.mktemp("scores")
    write_run(folder / "clipped", seed=5, **SMALL)
    write_run(folder / "factors", seed=5, factors=True, **SMALL)
    write_run(folder / "early", seed=5, early=True, **SMALL)
    write_run(folder / "still", seed=5, learning_rate=0.0, **SMALL)
    step = open_run(folder / "clipped").step(INFLUENCE_TRACE, 1)
    columns = {name: step[name] for name in step.columns}
    columns["no_step"] = np.concatenate([np.arange(length) == 2 for length in step["length"]])
    with TraceWriter(folder / "clipped", INFLUENCE_TRACE, on_error="raise") as writer:
        writer.write(1, columns, step.meta)
    return folder


def view_of(path: Path) -> ScoredStep:
    found = load_step(open_run(path), 1)
    assert found is not None
    return found


def groups_of(view: ScoredStep) -> tuple[int, int]:
    """(the measured group, one that is scored and not measured)."""
    books = {g: found for g in range(view.n_groups) if (found := view.books(g))}
    return next(g for g, b in books.items() if b.is_measured), next(g for g, b in books.items() if not b.is_measured)


@pytest.fixture
def open_page(runs: Path, browser: Browser) -> Iterator[object]:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    with serving([], runs) as address:
        watched = Watched(page, address)
        yield lambda hash_: watched.open(hash_)
        assert watched.errors == []
        page.close()


# ---------------------------------------------------------------- numbers and sentences


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([0.2081, 0.12], "+0.208 nats"),
        ([0.0123], "+0.0123 nats"),
        ([-0.0003], "−0.300 m-nats"),
        ([4.5e-6], "+4.50 µ-nats"),
        ([12.0], "+12.0 nats"),
        ([0.0], "0.00 nats"),
        ([], "0.00 nats"),
    ],
)
def test_nats_are_written_in_a_unit_that_fits_the_largest(values: list[float], words: str) -> None:
    nats = Nats(values)
    assert f"{nats.signed(values[0] if values else 0.0)} {nats.unit}" == words


WRITTEN = """async value => {
    const { natsStyle } = await import("/static/js/format.js");
    const style = natsStyle(value);
    return [style.signed(value), style.unit];
}"""


def test_the_page_writes_nats_as_the_terminal_does(open_page, runs: Path) -> None:  # type: ignore[no-untyped-def]
    page = open_page("#/run?run=clipped")
    for value in (0.2081, -0.0123, 0.00999, -3e-4, 4.5e-6, 8e-8, 2e-12, 12.0, 1234.0, 0.0):
        nats = Nats([value])
        assert page.evaluate(WRITTEN, value) == [nats.signed(value), nats.unit], value


@pytest.mark.parametrize(
    ("books", "sentence"),
    [
        (
            Books(0.208, 0.180, 0.120, 0.028),
            "This step raised the group's objective by 0.208 nats: 0.120 by its own tokens, 0.060 by other prompts of "
            "the batch, 0.028 by momentum.",
        ),
        (
            Books(-0.002, -0.0025, -0.003, 0.0005),
            "This step lowered the group's objective by 2.00 m-nats: −3.00 by its own tokens, +0.50 by other prompts "
            "of the batch, +0.50 by momentum.",
        ),
        (
            Books(0.1, 0.15, 0.15, 0.0),
            "This step raised the group's objective by 0.100 nats: 0.150 by its own tokens, −0.050 by curvature (the "
            "rest).",
        ),
        (Books(0.0, 0.0, 0.0, 0.0), "This step raised the group's objective by 0.00 nats."),
    ],
    ids=["raised", "lowered", "a rest", "nothing moved"],
)
def test_a_measured_group_says_what_came_from_where(books: Books, sentence: str) -> None:
    assert books.sentence() == sentence


def test_parts_of_a_stored_group_are_told_and_the_token_that_is_most_of_it(runs: Path) -> None:
    view = view_of(runs / "clipped")
    part = view.parts[INFLUENCE_TRACE]
    alone = StepTable(view.step, {INFLUENCE_TRACE: part}, whole=True)
    g, _ = groups_of(view)
    books = view.books(g)
    assert books is not None and books == books_of(alone, int(view.groups_in(INFLUENCE_TRACE)[g]))
    tokens = view.tokens_of(view.members(g))
    assert books.by_batch == pytest.approx(float(view.need("influence")[tokens].sum()), rel=1e-5)
    assert books.by_own == pytest.approx(float(view.need("influence_own")[tokens].sum()), rel=1e-5)


def test_updates_that_scores_cannot_be_read_from_as_usual_are_told() -> None:
    early, still, usual = (
        {"second_moment": "batch_gradient", "learning_rate": 1e-4},
        {"second_moment": "batch_gradient", "learning_rate": 0.0},
        {"second_moment": "state_with_batch", "learning_rate": 1e-4},
    )
    assert remarks([usual]) == [] and remarks([]) == []
    assert remarks([early])[0].startswith("The scores say what the step did to each token")
    assert remarks([still]) == ["The weights did not move, because the learning rate was 0."]
    assert remarks([early, usual, usual])[0].startswith("In 1 of the 3 optimizer steps the scores say")


# ---------------------------------------------------------------- pages


def test_a_measured_group_shows_its_books_and_what_became_of_its_tokens(open_page, runs: Path) -> None:  # type: ignore[no-untyped-def]
    view = view_of(runs / "clipped")
    g, other = groups_of(view)
    (strongest,) = view.alternatives(g)
    place = f"{strongest.response}.{strongest.position}"
    page = open_page(f"#/group?run=clipped&step=1&group={g}&sel={place}")
    expect(page.locator(".books")).to_contain_text(re.compile("This step (raised|lowered) the group's objective by"))
    expect(page.locator(".legend.slot-1 .unit")).to_have_text("change of the objective by this optimizer step")
    dock = page.locator(".dock")
    expect(dock).to_contain_text("gained most")
    expect(dock).to_contain_text(": 0.55 → 0.63")
    expect(dock).to_contain_text("= its influence on its own prompt")
    own = dock.locator("dt", has_text="on own prompt").locator("xpath=following-sibling::dd[2]").inner_text()
    assert own.split(" ")[0] == dock.locator("dd.total").inner_text()  # the panel and the number of the token agree
    page.locator(".legend.slot-0 select").select_option("log_prob_change")
    expect(page.locator(".explain .slot-0")).to_contain_text("the optimizer step made the token likelier")
    page = open_page(f"#/group?run=clipped&step=1&group={other}&sel=0.0")
    expect(page.locator(".books")).to_contain_text("This group was not measured")
    expect(dock).to_contain_text("measured groups only: trainer.influence_trace.measure=all")
    expect(page.locator(".bar-column")).to_have_count(0)


def test_clipped_tokens_are_marked(open_page, runs: Path) -> None:  # type: ignore[no-untyped-def]
    view = view_of(runs / "clipped")
    g, _ = groups_of(view)
    page: Page = open_page(f"#/group?run=clipped&step=1&group={g}")
    expect(page.locator(".row .slot-1 .t.clipped")).to_have_count(len(view.members(g)))
    expect(page.locator(".explain .slot-1")).to_contain_text("training takes no step on this token")
    page.locator(".row .slot-1 .t.clipped").first.hover()
    expect(page.get_by_role("tooltip")).to_contain_text("clipped")


def test_the_step_page_sums_nats_and_shows_what_was_measured(open_page, runs: Path) -> None:  # type: ignore[no-untyped-def]
    view = view_of(runs / "clipped")
    g, _ = groups_of(view)
    page: Page = open_page("#/step?run=clipped&step=1")
    scored = sum(bool(view.group_scores(each)) for each in range(view.n_groups))
    expect(page.locator(".c-sum .with-bar")).to_have_count(scored)
    expect(page.locator("th.c-sum")).to_have_text("Σ influence, nats")
    sums = [float(text.replace("−", "-")) for text in page.locator(".c-sum b").all_inner_texts()]
    assert sums == sorted(sums, reverse=True)
    books = view.books(g)
    assert books is not None
    shown = [text for text in page.locator("td.c-change").all_inner_texts() if text != "–"]
    assert [float(text.replace("−", "-")) for text in shown] == [pytest.approx(books.change, abs=5e-4)]
    expect(page.get_by_role("radiogroup", name="Score")).to_have_count(0)


@pytest.mark.parametrize(
    ("run", "words"), [("early", "because Adam's state was empty"), ("still", "the learning rate was 0")]
)
def test_steps_whose_scores_mean_something_else_say_so(open_page, run: str, words: str, runs: Path) -> None:  # type: ignore[no-untyped-def]
    g, _ = groups_of(view_of(runs / run))
    for address in (f"#/step?run={run}&step=1", f"#/group?run={run}&step=1&group={g}"):
        expect(open_page(address).locator(".notice").first).to_contain_text(words)


def test_scores_of_captured_factors_keep_their_names_and_unit(open_page, runs: Path) -> None:  # type: ignore[no-untyped-def]
    view = view_of(runs / "factors")
    table = step_payload(view, load_vocabulary(open_run(runs / "factors")))
    assert table["scores"] == ["influence_loss_term", "influence_position"] and table["meta"]["unit"] == "influence"
    g = next(g for g in range(view.n_groups) if view.group_scores(g))
    structure = group_payload(view, g, load_vocabulary(open_run(runs / "factors")))
    assert structure["pairwise"]["score"] == "influence_position" and view.books(g) is None
    page: Page = open_page(f"#/group?run=factors&step=1&group={g}")
    expect(page.locator(".legend.slot-1 .unit")).to_contain_text("loss term credit, change in objective per unit step")
    page.get_by_role("radio", name="position").click()
    expect(page.locator(".legend.slot-1 .unit")).to_contain_text("position credit")
    expect(page.locator(".explain .slot-1")).to_contain_text("helps the accepted responses against the rejected ones")
    before = page.locator(".remarks").first.text_content()
    assert "prompt" in (before or "") and "nats" not in (before or "")
    page.get_by_role("radio", name="loss term").click()
    assert page.locator(".remarks").first.text_content() != before
    page.locator(".row .slot-1 .t").nth(4).click()
    expect(page.locator(".dock")).to_contain_text("effects were stored by position credit; the tokens show loss term")
    expect(page.locator(".bar-column")).to_have_count(8)
    expect(page.locator(".books")).to_have_count(0)


def test_a_file_with_strange_alternatives_is_shown_without_them(runs: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "run", seed=5, **SMALL)
    step = open_run(tmp_path / "run").step(INFLUENCE_TRACE, 1)
    (known,) = step.meta["alternatives"]
    strange = [None, {}, {**known, "token": 10**6}, {**known, "row": -5}, {**known, "gained": [["x", 0, 1]]}, known]
    with TraceWriter(tmp_path / "run", INFLUENCE_TRACE, on_error="raise") as writer:
        writer.write(1, {name: step[name] for name in step.columns}, {**step.meta, "alternatives": strange})
    view = view_of(tmp_path / "run")
    g, _ = groups_of(view)
    assert len(view.alternatives(g)) == 1
    json.dumps(group_payload(view, g, load_vocabulary(open_run(tmp_path / "run"))))
