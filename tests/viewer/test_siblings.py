"""Siblings on the group page: identical ones collapsed, any two compared from their first difference on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from playwright.sync_api import expect

from gradtrace import open_run
from gradtrace.viewer.scores import ScoredStep, load_step
from tests.viewer.serving import Watched

STEP = 2


@pytest.fixture(scope="module")
def view(runs_dir: Path) -> ScoredStep:
    found = load_step(open_run(runs_dir / "chains"), STEP)
    assert found is not None
    return found


def texts_of(view: ScoredStep, g: int) -> list[tuple[int, ...]]:
    return [tuple(view.ids(r).tolist()) for r in view.members(g)]


def test_identical_responses_are_one_row_that_says_how_many_and_spreads(viewer: Watched, view: ScoredStep) -> None:
    g = next(g for g in range(view.n_groups) if 1 < len(set(texts_of(view, g))) < len(texts_of(view, g)))
    texts = texts_of(view, g)
    page = viewer.open(f"#/group?step={STEP}&group={g}")
    expect(page.locator(".row:visible")).to_have_count(len(set(texts)))
    times = sorted(f"×{count}" for count in Counter(texts).values() if count > 1)
    assert sorted(page.locator(".twins").all_text_contents()) == times
    for twins in page.locator(".twins").all():
        twins.click()
    expect(page.locator(".row:visible")).to_have_count(len(texts))
    copy = next(index for index, text in enumerate(texts) if text in texts[:index])
    viewer.open(f"#/group?step={STEP}&group={g}&sel={copy}.0")  # a link to a collapsed one opens it
    page.reload()
    expect(page.locator(f".row[aria-label^='Response r{copy},']")).to_be_visible()


def test_two_responses_are_compared_from_their_first_difference(viewer: Watched, view: ScoredStep) -> None:
    g = next(g for g in range(view.n_groups) if len(set(texts_of(view, g))) > 1)
    texts = texts_of(view, g)
    other = next(index for index, text in enumerate(texts) if text != texts[0])
    first = next(i for i, (a, b) in enumerate(zip(texts[0], texts[other], strict=False)) if a != b)
    page = viewer.open(f"#/group?step={STEP}&group={g}")
    page.get_by_label("Compare response").select_option("r0")
    page.get_by_label("with response").select_option(f"r{other}")
    expect(page.locator(".diff")).to_contain_text(f"The same up to token {first}")
    lines = page.locator(".diff-line")
    for line, which in ((lines.nth(lines.count() - 2), 0), (lines.last, other)):
        expect(line.locator("b")).to_have_text(f"r{which}")
        marked = line.locator("mark").first.text_content() or ""
        page_token = page.locator(f".row[aria-label^='Response r{which},'] .slot-1 .t").nth(first)
        assert marked.startswith(page_token.text_content() or "?")
    page.reload()
    expect(page.locator(".diff")).to_be_visible()
    expect(page.get_by_label("with response")).to_have_value(str(other))
