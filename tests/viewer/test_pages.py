"""Every page in real Chromium: what is drawn, what a click and a key do, what survives a reload."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from gradtrace import open_run
from gradtrace.trace.columns import GroupStatus
from gradtrace.viewer.scores import ScoredStep, load_step
from tests.viewer.serving import Watched

STEP = 2


@pytest.fixture(scope="module")
def view(runs_dir: Path) -> ScoredStep:
    found = load_step(open_run(runs_dir / "chains"), STEP)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def scored(view: ScoredStep) -> int:
    return next(g for g in range(view.n_groups) if view.status(g) == GroupStatus.SCORED)


def nats(text: str) -> float:
    """ "−0.3 m-nats" as a number."""
    number, unit = text.split()
    return float(number.replace("−", "-")) * {"nats": 1.0, "m-nats": 1e-3, "µ-nats": 1e-6}[unit]


def parameters(page: Page) -> str:
    return str(page.evaluate("location.hash"))


def show_twins(page: Page) -> None:
    """Responses with the same text are collapsed at first."""
    expect(page.locator(".row").first).to_be_visible()
    for twins in page.locator(".twins").all():
        twins.click()


def token(page: Page, response: int, position: int, slot: int = 1):  # type: ignore[no-untyped-def]
    return page.locator(f".row[aria-label^='Response r{response},'] .slot-{slot} .t").nth(position)


# ---------------------------------------------------------------- run


def test_run_page_draws_the_logged_numbers(viewer: Watched, runs_dir: Path) -> None:
    page = viewer.open("#/run?smooth=0")
    expect(page.locator("h1")).to_have_text("chains")
    expect(page.locator(".chart")).to_have_count(7)
    rows, _ = open_run(runs_dir / "chains").metrics()
    reward = page.locator("[data-chart=reward] .values b")
    expect(reward).to_have_text(f"{rows[-1]['critic/rewards/mean']:.3f}")
    box = page.locator("[data-chart=reward] svg").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 48, box["y"] + 80)  # the first step
    expect(reward).to_have_text(f"{rows[0]['critic/rewards/mean']:.3f}")
    expect(page.locator(".step-flag text").first).to_have_text("1")


def test_clicking_a_chart_opens_that_step(viewer: Watched) -> None:
    page = viewer.open("#/run")
    box = page.locator("[data-chart=entropy] svg").bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] - 10, box["y"] + 60)
    expect(page.locator("h1")).to_have_text("Step 5")


def test_several_runs_are_laid_over_one_another(viewer: Watched) -> None:
    page = viewer.open("#/run")
    page.click(".run-picker > button")
    for name in ("chains-b", "prose"):
        page.get_by_label(f"compare with {name}").check()
    expect(page.locator(".keys .key .mono")).to_have_text(["chains", "chains-b", "prose"])
    curves = page.locator("[data-chart=reward] path.line:not(.raw)")
    expect(curves).to_have_count(3)
    page.reload()
    expect(page.locator(".keys .key .mono")).to_have_text(["chains", "chains-b", "prose"])
    patterns = {
        curves.nth(i).evaluate("node => getComputedStyle(node).strokeDasharray + getComputedStyle(node).stroke")
        for i in range(3)
    }
    assert len(patterns) == 3


def test_any_metric_can_be_charted_and_stays(viewer: Watched) -> None:
    page = viewer.open("#/run")
    page.keyboard.press("/")
    page.keyboard.type("grad_norm")
    page.get_by_role("button", name="actor/grad_norm").click()
    expect(page.locator("[data-chart='actor/grad_norm'] path.line")).not_to_have_count(0)
    page.reload()
    expect(page.locator("[data-chart='actor/grad_norm']")).to_have_count(1)


def test_run_page_by_keyboard(viewer: Watched) -> None:
    page = viewer.open("#/run")
    expect(page.locator(".chart").first).to_be_visible()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".step-flag text").first).to_have_text("2")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("Step 2")


def test_the_run_switcher_opens_another_run(viewer: Watched) -> None:
    page = viewer.open("#/run")
    page.click(".run-picker > button")
    page.locator(".run-menu a", has_text="prose").click()
    expect(page.locator("h1")).to_have_text("prose")
    page.go_back()
    expect(page.locator("h1")).to_have_text("chains")


# ---------------------------------------------------------------- step


def test_step_page_lists_every_group(viewer: Watched, view: ScoredStep, scored: int) -> None:
    page = viewer.open(f"#/step?step={STEP}")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(view.n_groups)
    skipped = sum(view.status(g) != GroupStatus.SCORED for g in range(view.n_groups))
    expect(page.locator("tr.skipped .reason", has_text="all rewards equal")).to_have_count(skipped)
    row = page.locator("tbody tr", has=page.locator(f"a:text-is('{scored}')"))
    passed = sum(bool(view.need("accepted")[r]) for r in view.members(scored))
    expect(row.locator(".c-accepted")).to_contain_text(f"{passed}/8")
    entropy = np.concatenate([view.need("entropy")[view.tokens(r)] for r in view.members(scored)]).mean()
    expect(row.locator(".c-entropy b")).to_have_text(f"{entropy:.3f}")


def test_sorting_and_filtering_survive_a_reload(viewer: Watched) -> None:
    page = viewer.open(f"#/step?step={STEP}")
    page.get_by_role("button", name="Entropy, nats").click()
    page.get_by_role("radio", name="mixed").click()
    page.keyboard.press("/")
    page.keyboard.type("pass<6 ent>0.1")
    shown = page.locator(".c-entropy b").all_text_contents()
    assert shown == sorted(shown, reverse=True) and shown
    page.reload()
    expect(page.locator("input[type=search]")).to_have_value("pass<6 ent>0.1")
    assert page.locator(".c-entropy b").all_text_contents() == shown
    expect(page.locator("th[aria-sort=descending]")).to_have_text("Entropy, nats")


def test_a_filter_without_hits_says_so(viewer: Watched) -> None:
    page = viewer.open(f"#/step?step={STEP}&q=nothing-like-this")
    expect(page.locator("tbody")).to_contain_text("No group matches “nothing-like-this”")


def test_step_page_by_keyboard(viewer: Watched) -> None:
    page = viewer.open(f"#/step?step={STEP}&sort=group")
    expect(page.locator("tbody tr").first).to_be_visible()
    for _ in range(3):
        page.keyboard.press("j")
    page.keyboard.press("k")
    expect(page.locator("tr.current a")).to_have_text("1")
    page.keyboard.press("Enter")
    expect(page.locator(".prompt .caption")).to_have_text(f"Prompt, group 1 of step {STEP}")
    page.go_back()
    expect(page.locator("h1")).to_have_text(f"Step {STEP}")
    page.keyboard.press("]")
    expect(page.locator("h1")).to_have_text(f"Step {STEP + 1}")
    page.keyboard.press("[")
    expect(page.locator("h1")).to_have_text(f"Step {STEP}")


# ---------------------------------------------------------------- group


def test_group_page_shows_the_prompt_and_every_token(
    viewer: Watched, view: ScoredStep, scored: int, runs_dir: Path
) -> None:
    page = viewer.open(f"#/group?step={STEP}&group={scored}")
    text = open_run(runs_dir / "chains").token_bytes
    assert text is not None
    expect(page.locator(".prompt .text")).to_have_text(text.decode(view.prompt(scored)))
    for index, response in enumerate(view.members(scored)):
        ids = view.token_id[view.tokens(response)]
        shown = page.locator(f".row[aria-label^='Response r{index},'] .slot-0 .t").all_text_contents()
        assert shown == [token.text for token in text.texts(ids, continues=True)]
    accepted = sum(bool(view.need("accepted")[r]) for r in view.members(scored))
    expect(page.locator(".row.accepted")).to_have_count(accepted)
    expect(page.locator(".row.rejected")).to_have_count(8 - accepted)


def test_colours_follow_the_values(viewer: Watched, view: ScoredStep, scored: int) -> None:
    page = viewer.open(f"#/group?step={STEP}&group={scored}")
    scores = view.column("influence")
    assert scores is not None
    mine = np.concatenate([scores[view.tokens(r)] for r in view.members(scored)])
    top = np.quantile(np.abs(mine), 0.99)
    expect(page.locator(".row").first).to_be_visible()
    for index, response in enumerate(view.members(scored)):
        for position, value in enumerate(scores[view.tokens(response)]):
            share = abs(value) / top
            if abs(share * 5 - round(share * 5)) < 1e-3 or abs(share - 0.08) < 1e-3:
                continue  # on the edge of two classes
            level = min(5, 1 + int(share * 5)) if share >= 0.08 else 0
            wanted = f"{'p' if value > 0 else 'n'}{level}" if level else ""
            names = (token(page, index, position).get_attribute("class") or "").split()
            assert [name for name in names if re.fullmatch("[pn][0-9]", name)] == ([wanted] if wanted else [])


def test_the_first_wrong_token_is_marked(viewer: Watched, view: ScoredStep, scored: int) -> None:
    page = viewer.open(f"#/group?step={STEP}&group={scored}")
    expect(page.locator(".row").first).to_be_visible()
    for index, response in enumerate(view.members(scored)):
        position = int(view.need("first_wrong")[response])
        marked = page.locator(f".row[aria-label^='Response r{index},'] .slot-1 .t.fw")
        expect(marked).to_have_count(int(position >= 0))
        if position >= 0:
            assert "fw" in (token(page, index, position).get_attribute("class") or "")


def test_hover_tells_every_metric_and_covers_nothing(viewer: Watched, view: ScoredStep, scored: int) -> None:
    page = viewer.open(f"#/group?step={STEP}&group={scored}")
    show_twins(page)
    token(page, 2, 4).hover()
    at = view.offsets[view.members(scored)[2]] + 4
    readout = page.get_by_role("tooltip")
    for text in (
        "r2, position 4",
        f"id{view.token_id[at]}",
        "bytes3",
        f"{view.need('entropy')[at]:.3f} nats",
        f"−{-view.need('log_prob')[at]:.3f}",
        "influence",
        "on own prompt",
        "by the step",
        "advantage",
    ):
        expect(readout).to_contain_text(text)
    expect(page.locator(".t.hov")).to_have_count(2)  # the same token in both columns
    box = readout.bounding_box()
    assert box is not None and box["y"] > 860  # at the foot of the window, over no token
    page.mouse.move(10, 10)
    expect(readout).to_be_hidden()


def test_clicking_a_token_shows_its_effect_on_every_sibling(viewer: Watched, view: ScoredStep, scored: int) -> None:
    page = viewer.open(f"#/group?step={STEP}&group={scored}")
    token(page, 3, 8).click()
    block = view.pairwise(view.members(scored)[3])
    assert block is not None
    effects = block.scores[8].astype(float)
    largest = float(np.abs(effects).max())
    expect(page.locator(".dock h3").first).to_contain_text("r3, position 8")
    expect(page.locator(".bar-column")).to_have_count(8)
    for index, effect in enumerate(effects):
        label = page.locator(".bar-column", has_text=re.compile(f"r{index}$")).get_attribute("title") or ""
        unit = 1e-3 if "m-nats" in (page.locator(".dock h3").nth(1).text_content() or "") else 1.0
        shown = unit * float(label.split(": ")[1].split(". ")[0].replace("−", "-"))
        assert shown == pytest.approx(effect, abs=0.051 * largest)  # two digits fit above a bar
        remark = page.locator(f".row[aria-label^='Response r{index},'] .remarks b").text_content() or ""
        assert nats(remark) == pytest.approx(effect, abs=0.006 * largest)
    shown = page.locator(".sum-table dd.total").text_content() or ""
    assert unit * float(shown.replace("−", "-")) == pytest.approx(effects.sum(), abs=0.01 * largest)
    own = view.need("influence_own")[view.tokens(view.members(scored)[3])][8]
    assert effects.sum() == pytest.approx(own, rel=1e-4)  # and so the panel and the token agree
    expect(page.locator(".meta.tinted")).to_have_count(8)
    expect(page.locator(".t.sel")).to_have_count(2)
    page.keyboard.press("ArrowRight")
    expect(page.locator(".dock h3").first).to_contain_text("r3, position 9")
    page.reload()
    expect(page.locator(".dock h3").first).to_contain_text("r3, position 9")
    page.keyboard.press("Escape")
    expect(page.locator(".dock")).to_be_hidden()
    expect(page.locator(".meta.tinted")).to_have_count(0)


def test_clicking_a_response_shows_what_every_token_does_to_it(viewer: Watched, view: ScoredStep, scored: int) -> None:
    page = viewer.open(f"#/group?step={STEP}&group={scored}")
    show_twins(page)
    page.locator(".response-id", has_text=re.compile("r5$")).click()
    expect(page.locator(".legend.slot-1 .target")).to_contain_text("on r5")
    token(page, 1, 12).hover()
    block = view.pairwise(view.members(scored)[1])
    assert block is not None
    item = page.get_by_role("tooltip").locator("span", has_text=re.compile("^on r5"))
    shown = nats((item.first.text_content() or "").removeprefix("on r5"))
    assert shown == pytest.approx(block.scores[12, 5], abs=1e-3)
    page.reload()
    expect(page.locator(".legend.slot-1 .target")).to_contain_text("on r5")
    page.locator(".legend.slot-1 .target button").click()
    expect(page.locator(".legend.slot-1 .target")).to_be_empty()


def test_every_choice_is_in_the_address(viewer: Watched, scored: int) -> None:
    page = viewer.open(f"#/group?step={STEP}&group={scored}")
    expect(page.locator(".row").first).to_be_visible()
    for key in "vscowj":
        page.keyboard.press(key)
    page.locator(".legend select").first.select_option("log_prob")
    hash_ = parameters(page)
    for part in (
        "view=stack",
        "scale=step",
        "order=influence",
        "spaces=1",
        "at=",
        "left=log_prob",
    ):
        assert part in hash_
    picture = page.locator(".sheet").inner_html()
    page.reload()
    expect(page.locator(".row.current")).to_have_count(1)
    assert page.locator(".sheet").inner_html() == picture
    page.keyboard.press("l")
    expect(page.locator(".prompt .caption")).to_contain_text(f"group {scored + 1}")
    assert "view=stack" in parameters(page) and "at=" not in parameters(page)


def test_log_prob_and_advantage_can_be_shown(viewer: Watched, scored: int) -> None:
    page = viewer.open(f"#/group?step={STEP}&group={scored}")
    page.locator(".legend.slot-0 select").select_option("log_prob")
    expect(page.locator(".slot-0 .t.l6").first).to_be_visible()
    page.locator(".legend.slot-0 select").select_option("advantage")
    expect(page.locator(".row.accepted .slot-0 .t[class*=' p']").first).to_be_visible()
    expect(page.locator(".row.rejected .slot-0 .t[class*=' n']").first).to_be_visible()


def test_a_group_of_equal_rewards_says_why_it_has_no_influence(viewer: Watched, view: ScoredStep) -> None:
    constant = next(g for g in range(view.n_groups) if view.status(g) == GroupStatus.CONSTANT_REWARD)
    page = viewer.open(f"#/group?step={STEP}&group={constant}")
    expect(page.locator(".notice")).to_contain_text("all 8 rewards are equal, so there is nothing to contrast")
    expect(page.locator(".row .slot-1 .t[class*=' e']").first).to_be_visible()
    token(page, 0, 4).click()
    expect(page.locator(".dock")).to_contain_text("not scored")


def test_find_in_responses(viewer: Watched) -> None:
    page = viewer.open("#/group?run=prose&step=1&group=0")
    expect(page.locator(".row").first).to_be_visible()
    page.keyboard.press("/")
    page.keyboard.type("multiples of 6")
    expect(page.locator(".find span")).to_contain_text("hits")
    page.keyboard.press("Enter")
    expect(page.locator(".find span")).to_contain_text("1 of")
    hit = "".join(page.locator(".row.current .slot-0 .t.found").all_text_contents())
    assert hit.strip().lower().startswith("multiples of 6")


def test_copy_gives_the_raw_text(viewer: Watched, runs_dir: Path) -> None:
    run = open_run(runs_dir / "prose")
    view = load_step(run, 1)
    assert view is not None and run.token_bytes is not None
    page = viewer.open("#/group?run=prose&step=1&group=0&view=side")
    expect(page.locator(".row").first).to_be_visible()
    index = int((page.locator(".row .response-id").first.text_content() or "r0")[1:])
    page.evaluate(
        """() => { const row = document.querySelector('.row .slot-0'); const range = document.createRange();
        range.selectNodeContents(row); const s = getSelection(); s.removeAllRanges(); s.addRange(range); }"""
    )
    page.evaluate("navigator.clipboard.writeText('')")
    page.keyboard.press("Control+c")
    copied = page.wait_for_function("navigator.clipboard.readText()").json_value()  # until there is something
    ids = view.token_id[view.tokens(view.members(0)[index])]
    assert copied == run.token_bytes.decode(ids, continues=True)
    assert "\n\n" in copied and copied.endswith("<|im_end|>")


def test_a_character_cut_in_two_is_marked(viewer: Watched, runs_dir: Path) -> None:
    run = open_run(runs_dir / "prose")
    view = load_step(run, 1)
    assert view is not None and run.token_bytes is not None
    half = next(i for i in range(len(run.token_bytes)) if run.token_bytes[i] == b" \xe2\x89")
    response = next(r for r in range(len(view.group)) if half in view.token_id[view.tokens(r)])
    page = viewer.open(f"#/group?run=prose&step=1&group={view.group[response]}")
    row = page.locator(f".row[aria-label^='Response r{view.members(view.group[response]).tolist().index(response)},']")
    row.scroll_into_view_if_needed()
    halves = row.locator(".slot-1 .t.hex")
    expect(halves.first).to_have_text("≤")
    expect(halves.nth(1)).to_have_text("a4")


def test_long_groups_keep_every_sibling_in_sight(viewer: Watched) -> None:
    page = viewer.open("#/group?run=prose&step=1&group=0")
    expect(page.locator(".rail button")).to_have_count(6)
    token(page, 0, 5).click()
    expect(page.locator(".rail button:is([class*=' p'], [class*=' n'])").first).to_be_visible()
    page.locator(".rail button").last.click()
    last = page.locator(".row").last
    expect(last).to_have_class(re.compile("current"))
    expect(last).to_be_in_viewport()
    page.locator(".overview canvas").first.scroll_into_view_if_needed()
    page.locator(".overview canvas").first.click(position={"x": 40, "y": 3})
    expect(page.locator(".row").first).to_have_class(re.compile("current"))


# ---------------------------------------------------------------- tokens


def test_tokens_page_ranks_and_brushing_filters(viewer: Watched, origin: str) -> None:
    page = viewer.open("#/tokens?run=prose&step=1")
    structure = httpx.get(f"{origin}/api/runs/2/steps/1/tokens").json()
    expect(page.locator(".sub")).to_contain_text(f"{structure['total']:,} response tokens")
    expect(page.locator(".brush-line")).to_have_text(f"All {structure['total']:,} tokens")
    box = page.locator("canvas.brush").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 70, box["y"] + box["height"] - 50, steps=3)
    page.mouse.up()
    expect(page.locator(".brush-line b")).not_to_have_text(f"{structure['total']:,} tokens")
    chosen = page.locator(".brush-line b").text_content()
    assert "brush=" in parameters(page)
    page.reload()
    expect(page.locator(".brush-line b")).to_have_text(chosen or "")
    page.keyboard.press("Escape")
    expect(page.locator(".brush-line")).to_have_text(f"All {structure['total']:,} tokens")


def test_a_token_of_the_leaderboard_leads_to_where_it_stands(viewer: Watched) -> None:
    page = viewer.open(f"#/tokens?step={STEP}&sort=count&dir=down")
    expect(page.locator("td.c-count").first).to_be_visible()
    counts = [int(text.replace(",", "")) for text in page.locator("td.c-count").all_text_contents()]
    assert counts == sorted(counts, reverse=True)
    chip = page.locator("td.c-text .token-chip").first
    text = chip.text_content()
    chip.click()
    link = page.locator(".occurrences a").first
    place = re.search(r"group (\d+), r(\d+) at (\d+)", link.text_content() or "")
    assert place
    link.click()
    expect(page.locator(".dock .token-chip")).to_have_text(text or "")
    expect(page.locator(".dock h3").first).to_contain_text(f"r{place[2]}, position {place[3]}")


# ---------------------------------------------------------------- everywhere


def test_dark_mode_follows_the_system_and_the_key_and_stays(browser: Browser, origin: str, scored: int) -> None:
    context = browser.new_context(color_scheme="dark")
    page = context.new_page()
    page.goto(f"{origin}/#/group?step={STEP}&group={scored}")
    background = "getComputedStyle(document.body).backgroundColor"
    expect(page.locator(".row").first).to_be_visible()
    assert page.evaluate(background) == "rgb(19, 21, 24)"
    page.keyboard.press("t")
    assert page.evaluate(background) == "rgb(253, 253, 251)"
    page.reload()
    expect(page.locator(".row").first).to_be_visible()
    assert page.evaluate(background) == "rgb(253, 253, 251)"
    context.close()


@pytest.mark.parametrize("width", [900, 390])
def test_narrow_windows_need_no_sideways_scrolling(viewer: Watched, width: int) -> None:
    viewer.page.set_viewport_size({"width": width, "height": 800})
    for hash_, part in {
        "#/run": "[data-chart=reward] path",
        "#/step?step=2": "tbody tr",
        "#/group?step=2": ".row .t",
        "#/group?run=prose&step=1": ".overview canvas",
        "#/tokens?step=2": "td.c-count",
        "#/find?what=harm": "tbody tr",
    }.items():
        page = viewer.open(hash_)
        expect(page.locator(part).last).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, hash_


def test_help_lists_the_keys(viewer: Watched, scored: int) -> None:
    page = viewer.open(f"#/group?step={STEP}&group={scored}")
    expect(page.locator(".row").first).to_be_visible()
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Reading the colours")
    expect(dialog).to_contain_text("response")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


def test_controls_have_names_for_screen_readers(viewer: Watched, scored: int) -> None:
    page = viewer.open(f"#/group?step={STEP}&group={scored}&sel=0.4")
    expect(page.locator(".dock")).to_be_visible()
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('button, a, input, select, [role]')].filter((node) =>
        node.offsetParent && !(node.textContent.trim() || node.getAttribute('aria-label')
        || node.getAttribute('aria-labelledby')))
        .map((node) => node.outerHTML.slice(0, 120))"""
    )
    assert nameless == []
    expect(page.locator("[aria-live=polite]").last).to_contain_text("r0 position 4, influence")
    unlabelled = page.locator("canvas:not([aria-label]):not([aria-hidden]), svg[role=img]:not([aria-label])")
    expect(unlabelled).to_have_count(0)


def test_unknown_addresses_say_what_is_missing(viewer: Watched) -> None:
    page = viewer.open("#/run?run=no-such-run")
    expect(page.locator(".empty")).to_contain_text("There is no run called “no-such-run” here")
    page = viewer.open("#/step?step=77")
    expect(page.locator(".empty")).to_contain_text("No trace of step 77")
    page.get_by_text("step 5", exact=True).click()
    expect(page.locator("h1")).to_have_text("Step 5")
