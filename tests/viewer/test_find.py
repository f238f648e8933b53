"""Find across a run: what is found is there, in parts as in one go, and a prompt is followed over the steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, expect

from gradtrace import open_run
from gradtrace.viewer.catalog import RunCatalog, ServedRun
from gradtrace.viewer.scores import load_step
from gradtrace.viewer.search import MOST_A_STEP, Query, prompt_key, search
from tests.viewer.serving import Watched, serving
from tests.viewer.test_story import ANSWERS, LOSS_TERM, written


@pytest.fixture(scope="module")
def served(runs_dir: Path) -> ServedRun:
    found = RunCatalog([runs_dir / "chains"], None).get(0)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def falling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One prompt in two steps: first all of its four answers pass, then one."""
    path = tmp_path_factory.mktemp("falling") / "run"
    written(path, ANSWERS, [1.0, 1.0, 1.0, 1.0], step=1)
    written(path, ANSWERS, [0.0, 1.0, 0.0, 0.0], step=4, scores={"influence": LOSS_TERM})
    return path


@pytest.mark.parametrize("query", [Query("text", "=1"), Query("token", "7"), Query("harm"), Query("prompts")], ids=str)
def test_step_by_step_finds_the_same_as_in_one_go(served: ServedRun, query: Query) -> None:
    whole = search(served, query, 0, seconds=600)
    assert whole["next"] is None and whole["searched"] == whole["steps"] == 5
    parts, after, asked = [], 0, 0
    while after is not None:
        answer = search(served, query, after, seconds=0)
        parts += answer["hits"]
        after, asked = answer["next"], asked + 1
    assert asked == 5
    assert [hit["step"] for hit in parts] == [hit["step"] for hit in whole["hits"]]
    assert len(parts) > 0


def test_step_zero_of_imported_rollouts_is_searched_too(tmp_path: Path) -> None:
    for step in (0, 1):
        written(tmp_path / "run", ANSWERS, [0.0, 1.0, 0.0, 0.0], step=step)
    served = RunCatalog([tmp_path / "run"], None).get(0)
    assert served is not None
    first = search(served, Query("prompts"), 0, seconds=0)
    assert ([hit["step"] for hit in first["hits"]], first["searched"], first["next"]) == ([0], 1, 1)
    second = search(served, Query("prompts"), 1, seconds=0)
    assert ([hit["step"] for hit in second["hits"]], second["searched"], second["next"]) == ([1], 2, None)


def test_a_text_is_found_where_it_stands_whatever_its_case(served: ServedRun) -> None:
    hits = search(served, Query("text", "<EOS>"), 0, seconds=600)["hits"]
    for hit in [hit for hit in hits if hit["response"] is not None][:5]:
        view = load_step(served.run, hit["step"])
        assert view is not None
        ids = view.ids(view.members(hit["group"])[hit["response"]])
        assert served.vocabulary.text([int(ids[hit["position"]])]) == "<eos>"
        assert hit["match"] == "<eos>"


def test_the_most_harmful_tokens_have_the_lowest_scores(served: ServedRun) -> None:
    hits = [hit for hit in search(served, Query("harm"), 0, seconds=600)["hits"] if hit["step"] == 2]
    view = load_step(served.run, 2)
    assert view is not None
    scores = view.main_scores
    assert scores is not None
    lowest = np.sort(scores[scores < 0])[:MOST_A_STEP]
    assert np.allclose([hit["score"] for hit in hits], lowest)


def test_tokens_on_which_sampler_and_trainer_disagree_are_listed_and_none_is_explained(
    tmp_path: Path, falling: Path, browser: Browser
) -> None:
    gaps = [0.0, 0.5, 0.0, -1.5, 0.0002, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0]
    written(tmp_path / "apart", ANSWERS, [0.0, 1.0, 0.0, 0.0], gaps=gaps)
    served = RunCatalog([tmp_path / "apart"], None).get(0)
    assert served is not None
    hits = search(served, Query("mismatch"), 0)["hits"]
    assert [hit["score"] for hit in hits] == pytest.approx([-1.5, 0.5, 0.1], abs=1e-6)
    with serving([tmp_path / "apart", falling]) as address:
        watched = Watched(browser.new_page(), address)
        page = watched.open("#/find?what=mismatch")
        expect(page.locator("tbody tr")).to_have_count(3)
        expect(page.locator("tbody tr").first).to_contain_text("−1.5")
        page = watched.open("#/find?what=mismatch&run=run")
        expect(page.locator(".find-status")).to_contain_text("no log-probs of the sampler")
        assert watched.errors == []
        page.close()


def test_a_prompt_is_followed_over_the_steps_with_its_answers(falling: Path) -> None:
    served = RunCatalog([falling], None).get(0)
    view = load_step(open_run(falling), 4)
    assert served is not None and view is not None
    first, last = search(served, Query("prompt", prompt=prompt_key(view, 0)), 0)["hits"]
    assert (first["step"], first["passed"], last["step"], last["passed"]) == (1, 4, 4, 1)
    assert [(answer["times"], answer["accepted"]) for answer in first["answers"]] == [(2, True), (2, True)]


def test_the_page_lists_fallen_prompts_and_leads_to_one_over_time(falling: Path, browser: Browser) -> None:
    with serving([falling]) as address:
        watched = Watched(browser.new_page(viewport={"width": 1440, "height": 900}), address)
        page = watched.open("#/find?what=prompts")
        expect(page.locator("tbody tr")).to_contain_text("4/4 → 1/4")
        expect(page.locator(".find-status")).to_contain_text("2 of 2 traced steps searched")
        page.get_by_role("link", name="2 times").click()
        expect(page.locator(".history section")).to_have_count(2)
        page.get_by_role("link", name="Step 4").last.click()
        page.wait_for_url("**/#/group?**step=4**")
        page.get_by_role("link", name="this prompt over time").click()
        expect(page.locator(".history section")).to_have_count(2)
        page.get_by_role("radio", name="a token").click()
        page.get_by_label("Find a token in the whole run").fill("#7")
        page.keyboard.press("Enter")
        expect(page.locator("tbody tr")).to_have_count(4)
        page.locator("tbody a").first.click()
        expect(page.locator(".dock")).to_contain_text("position 1")
        assert watched.errors == []
        page.close()


def test_what_cannot_be_searched_for_is_refused_in_words(falling: Path, browser: Browser) -> None:
    with serving([falling]) as address:
        page = browser.new_page()
        for query in ("what=everything", "what=text&q=", "what=prompt"):
            answer = page.request.get(f"{address}/api/runs/0/find?{query}")
            assert answer.status == 400 and answer.json()["error"]
        page.close()
