"""The TracIn and entropy-probe pages in real Chromium."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from gradtrace import open_run
from gradtrace.instruments.entropy_probe import ENTROPY_PROBE, ProbeBatch
from gradtrace.instruments.tracin import TRACIN, TracinReason
from gradtrace.trace.run_files import RunFiles
from gradtrace.trace.step import Step
from tests.viewer.conftest import write_run
from tests.viewer.serving import Watched, serving

STEP = 2


@pytest.fixture(scope="module")
def tracin(runs_dir: Path) -> Step:
    return open_run(runs_dir / "chains").step(TRACIN, STEP)


@pytest.fixture(scope="module")
def probe(runs_dir: Path) -> Step:
    return open_run(runs_dir / "chains").step(ENTROPY_PROBE, STEP)


def hash_of(page: Page) -> str:
    return str(page.evaluate("location.hash"))


def counts_of_bars(page: Page) -> list[tuple[int, int]]:
    """(kept, dropped) of every bar, from its words."""
    labels = page.locator(".score-bar").evaluate_all("nodes => nodes.map(node => node.getAttribute('aria-label'))")
    found = [re.search(r": ([\d,]+) responses? kept, (\d+) dropped", label) for label in labels]
    return [(int(match[1].replace(",", "")), int(match[2])) for match in found if match]


# ---------------------------------------------------------------- TracIn


def test_scores_over_training_stay_readable_beside_one_extreme_value(browser: Browser, tmp_path: Path) -> None:
    """One step's scores are a million times larger: those of the others still lie at different heights."""
    run = write_run(tmp_path / "run", groups=6, steps=8)
    lines = open_run(run).metrics()[0]
    (run / "metrics.jsonl").unlink()
    with RunFiles(run) as files:
        for line in lines:
            step, mean = line.pop("step"), line.pop("tracin/mean_ip")
            unit = "tracin/plain_mean_ip" if step == 1 else "tracin/mean_ip"
            files.log(step, line | {unit: mean * (1e6 if step == 5 else 1)})
    with serving([run]) as address, browser.new_page(viewport={"width": 1440, "height": 900}) as page:
        page.goto(f"{address}/#/tracin?step={STEP}")
        chart = page.locator("[data-chart=tracin-scores]")
        expect(chart.locator(".note")).to_have_text("step 1, before Adam has a state, has another unit")
        expect(chart.locator(".off-axis")).to_contain_text("step 5: ")
        drawn = chart.locator("path.line").get_attribute("d") or ""
        chart.screenshot(path=str(tmp_path / "chart.png"))
    heights = [float(point.split()[1]) for point in re.split("[ML]", drawn) if point]
    assert len(heights) == 7
    ordinary = sorted(height for index, height in enumerate(heights) if index != 3)
    assert ordinary[-1] - ordinary[0] > 10  # pixels, of 154


def test_every_scored_response_is_in_one_bar(viewer: Watched, tracin: Step) -> None:
    page = viewer.open(f"#/tracin?step={STEP}")
    expect(page.locator("h1")).to_have_text(f"TracIn, step {STEP}")
    candidates = tracin["reason"] != int(TracinReason.VALIDATION)
    scored = candidates & (tracin["score"] != 0)
    expect(page.locator(".score-bar")).not_to_have_count(0)
    bars = counts_of_bars(page)
    assert sum(kept for kept, _ in bars) == int((scored & tracin["kept"]).sum())
    assert sum(dropped for _, dropped in bars) == int((scored & ~tracin["kept"]).sum())
    expect(page.locator(".zero-line-words")).to_contain_text(f"{int((candidates & ~scored).sum())} response")


def test_a_bar_opens_the_responses_behind_it_and_stays_after_a_reload(viewer: Watched) -> None:
    page = viewer.open(f"#/tracin?step={STEP}")
    expect(page.locator(".score-bar")).not_to_have_count(0)
    bars = counts_of_bars(page)
    fullest = int(np.argmax([sum(bar) for bar in bars]))
    page.locator(f".score-bar[data-bar='{fullest}']").click()
    expect(page.locator(".responses tbody tr.opens")).to_have_count(min(60, sum(bars[fullest])))
    expect(page.locator(".score-bar[aria-pressed=true]")).to_have_count(1)
    assert f"bar={fullest}" in hash_of(page)
    shown = page.locator(".list-caption b").text_content()
    page.reload()
    expect(page.locator(".list-caption b")).to_have_text(shown or "")
    page.keyboard.press("Escape")
    expect(page.locator(".score-bar[aria-pressed=true]")).to_have_count(0)
    assert "bar=" not in hash_of(page)


def test_scores_are_listed_in_order_and_filtered_by_what_happened(viewer: Watched, tracin: Step) -> None:
    page = viewer.open(f"#/tracin?step={STEP}&order=high&show=dropped")
    dropped = (~tracin["kept"]) & (tracin["reason"] != int(TracinReason.VALIDATION))
    rows = page.locator(".responses tbody tr.opens")
    expect(rows).to_have_count(int(dropped.sum()))
    listed = [int(row.get_attribute("data-response") or -1) for row in rows.all()]
    assert listed == sorted(np.flatnonzero(dropped).tolist(), key=lambda r: (-tracin["score"][r], r))
    page.keyboard.press("f")  # dropped → all
    expect(page.get_by_role("radio", name="all")).to_have_attribute("aria-checked", "true")


def test_a_response_opens_with_its_whole_text_and_a_way_to_its_group(
    viewer: Watched, tracin: Step, runs_dir: Path
) -> None:
    page = viewer.open(f"#/tracin?step={STEP}")
    first = page.locator(".responses tbody tr.opens").first
    response = int(first.get_attribute("data-response") or -1)
    first.click()
    text = open_run(runs_dir / "chains").token_bytes
    assert text is not None
    tokens = page.locator(".opened .t")
    expect(tokens).to_have_count(int(tracin["length"][response]))
    assert tokens.all_text_contents()[0] == text.decode(tracin.tokens(response)["token_id"][:1].tolist())
    assert f"sel={response}" in hash_of(page)
    tokens.nth(4).hover()
    expect(page.get_by_role("tooltip")).to_contain_text("position 4")
    group = int(tracin["group_id"][tracin["group"][response]])
    page.get_by_role("link", name=f"tokens of group {group}").click()
    expect(page.locator(".prompt .caption")).to_have_text(f"Prompt, group {group} of step {STEP}")


def test_validation_prompts_are_listed_with_their_rewards(viewer: Watched, tracin: Step) -> None:
    page = viewer.open(f"#/tracin?step={STEP}")
    validation = tracin["reason"] == int(TracinReason.VALIDATION)
    groups = np.unique(tracin["group"][validation])
    rows = page.locator(".validation-table tr.opens")
    expect(rows).to_have_count(len(groups))
    mean = tracin["reward"][validation & (tracin["group"] == groups[0])].mean()
    expect(rows.first.locator("td.number")).to_have_text(f"{mean:.2f}")
    rows.first.click()
    expect(page.locator(".validation-responses li")).to_have_count(int((tracin["group"] == groups[0]).sum()))
    assert f"val={groups[0]}" in hash_of(page)


def test_tracin_page_by_keyboard(viewer: Watched) -> None:
    page = viewer.open(f"#/tracin?step={STEP}")
    expect(page.locator(".score-bar")).not_to_have_count(0)
    page.keyboard.press("ArrowRight")
    expect(page.locator(".score-bar[aria-pressed=true]")).to_have_count(1)
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page.locator(".opened .t").first).to_be_visible()
    page.keyboard.press("]")
    expect(page.locator("h1")).to_have_text(f"TracIn, step {STEP + 1}")
    page.keyboard.press("[")
    expect(page.locator("h1")).to_have_text(f"TracIn, step {STEP}")


def test_curves_of_tracin_metrics_open_their_step(viewer: Watched) -> None:
    page = viewer.open(f"#/tracin?step={STEP}")
    expect(page.locator("[data-chart='tracin-scores'] .chart-band")).to_have_count(1)
    expect(page.locator("[data-chart='tracin-kept'] path.line")).to_have_count(1)
    expect(page.locator("[data-chart='tracin-scores'] .step-flag text")).to_have_text(str(STEP))
    chart = page.locator("[data-chart='tracin-signs'] svg")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] - 10, box["y"] + 60)
    expect(page.locator("h1")).to_have_text("TracIn, step 5")


def test_the_diagnosis_is_shown_in_words(tmp_path: Path, browser: object) -> None:
    path = write_run(tmp_path / "run", groups=4, steps=1)
    sentences = open_run(path).step(TRACIN, 1).meta["diagnosis"]
    with serving([path]) as address:
        page = browser.new_page()  # type: ignore[attr-defined]
        page.goto(f"{address}/#/tracin")
        expect(page.locator(".diagnosis li")).to_have_text(sentences)
        if not sentences:
            expect(page.locator(".diagnosis")).to_contain_text("Nothing notable")
        page.close()


# ---------------------------------------------------------------- entropy probe


def test_the_probe_page_states_both_changes_with_their_errors(viewer: Watched, probe: Step) -> None:
    page = viewer.open(f"#/probe?step={STEP}")
    expect(page.locator("h1")).to_have_text(f"Entropy probe, step {STEP}")
    facts = page.locator(".fact").all_text_contents()
    assert sum("±" in fact for fact in facts) == 2
    expect(page.locator("[data-chart='entropy-change'] path.line")).to_have_count(2)
    expect(page.locator("[data-chart='entropy-change'] .chart-band")).to_have_count(2)
    expect(page.locator(".identity-mark")).to_have_count(len(probe.meta["eta_sweep"]))
    expect(page.locator(".identity-line")).to_have_count(1)
    expect(page.locator(".parts tr")).to_have_count(5)


def test_responses_of_the_update_are_ordered_by_their_share(viewer: Watched, probe: Step) -> None:
    page = viewer.open(f"#/probe?step={STEP}")
    update = np.flatnonzero(probe["batch"] == int(ProbeBatch.UPDATE))
    wanted = sorted(update.tolist(), key=lambda r: -abs(probe["share"][r]))
    rows = page.locator(".probe-row")
    expect(rows).to_have_count(min(16, len(wanted)))
    assert [int(row.get_attribute("data-response") or -1) for row in rows.all()] == wanted[: rows.count()]
    page.keyboard.press("o")
    expect(rows.first).to_have_attribute("data-response", str(update[0]))
    assert "order=sampled" in hash_of(page)


def test_heat_maps_take_the_colour_of_the_sign(viewer: Watched, probe: Step) -> None:
    page = viewer.open(f"#/probe?step={STEP}&batch=evaluation")
    row = page.locator(".probe-row").first
    response = int(row.get_attribute("data-response") or -1)
    for index, column in enumerate(("entropy_change", "entropy_change_measured")):
        values = probe.tokens(response)[column]
        spans = row.locator(".map").nth(index).locator(".t")
        expect(spans).to_have_count(len(values))
        classes = [span.get_attribute("class") or "" for span in spans.all()]
        signs = [re.search(r"\b([pn])[1-5]\b", names) for names in classes]
        assert any(signs)
        for value, sign in zip(values, signs, strict=True):
            assert sign is None or (sign[1] == "p") == (value > 0)


def test_the_probe_page_keeps_its_choices_in_the_address(viewer: Watched) -> None:
    page = viewer.open(f"#/probe?step={STEP}")
    expect(page.locator(".probe-row")).not_to_have_count(0)
    page.keyboard.press("b")
    page.keyboard.press("j")
    page.keyboard.press("j")
    expect(page.locator(".probe-row.current")).to_have_count(1)
    chosen = page.locator(".probe-row.current").get_attribute("data-response")
    assert "batch=evaluation" in hash_of(page) and f"sel={chosen}" in hash_of(page)
    page.reload()
    expect(page.locator(".probe-row.current")).to_have_attribute("data-response", chosen or "")


def test_runs_without_the_instruments_have_no_tabs_for_them(tmp_path: Path, browser: object) -> None:
    path = write_run(tmp_path / "plain", groups=2, steps=1, tracin=False, probe=False)
    with serving([path]) as address:
        page = browser.new_page()  # type: ignore[attr-defined]
        page.goto(f"{address}/")
        expect(page.locator(".tab")).to_have_text(["Run", "Step 1", "Group", "Tokens", "Find"])
        page.goto(f"{address}/#/tracin")
        expect(page.locator(".empty")).to_contain_text("trainer.tracin.enable=true")
        page.goto(f"{address}/#/probe")
        expect(page.locator(".empty")).to_contain_text("trainer.entropy_probe.every=1")
        page.close()


def test_a_probe_of_one_checkpoint_opens_on_its_page(tmp_path: Path, browser: object) -> None:
    path = write_run(tmp_path / "step_000003", groups=2, steps=1, tracin=False)
    for name in ("metrics.jsonl", "entropy_trace/manifest.jsonl", "influence_trace/manifest.jsonl"):
        (path / name).unlink()
    with serving([path]) as address:
        page = browser.new_page()  # type: ignore[attr-defined]
        page.goto(f"{address}/")
        expect(page.locator("h1")).to_have_text("Entropy probe, step 1")
        expect(page.locator(".tab")).to_have_text(["Entropy probe"])
        expect(page.locator(".identity-mark")).to_have_count(5)
        page.close()


@pytest.mark.parametrize("address", ["#/tracin?step=2", "#/probe?step=2&batch=evaluation"])
@pytest.mark.parametrize("width", [390, 900, 1440])
def test_nothing_is_wider_than_the_window(viewer: Watched, address: str, width: int) -> None:
    viewer.page.set_viewport_size({"width": width, "height": 844})
    page = viewer.open(address)
    expect(page.locator("h1")).to_be_visible()
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
