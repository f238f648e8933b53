"""Runs that grow, that are damaged, that have nothing to show, and runs full of hostile text, in real Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from gradtrace import open_run
from gradtrace.trace.run_files import RunFiles
from gradtrace.trace.token_text import Rules, TokenBytes
from gradtrace.viewer.scores import load_step
from tests.viewer.conftest import write_run
from tests.viewer.sample import SampleRun
from tests.viewer.sample.groups import SampleGroup, SampleResponse
from tests.viewer.serving import Watched, serving


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(30_000)
    yield context.new_page()
    context.close()


def test_pages_follow_a_run_that_is_still_writing(page: Page, tmp_path: Path) -> None:
    run = SampleRun(tmp_path / "growing", groups=4, total_steps=6)
    run.write_step(1)
    with serving([run.path]) as origin:
        watched = Watched(page, origin)
        watched.open("#/run?smooth=0")
        expect(page.locator(".live")).to_contain_text("live, step 1 of 6")
        expect(page.locator(".recent tbody tr")).to_have_count(1)
        run.write_step(2)
        expect(page.locator(".live")).to_contain_text("step 2 of 6")
        expect(page.locator(".recent tbody tr")).to_have_count(2)
        expect(page.locator("[data-chart=reward] path.line")).to_have_count(1)
        page.goto(f"{origin}/#/step?step=2")
        following = page.get_by_role("button", name="next step")
        expect(following).to_be_disabled()
        page.goto(f"{origin}/#/group?step=3&group=1")  # a page that waits for its step
        expect(page.locator(".empty")).to_contain_text("Step 3 has not been written yet")
        run.write_step(3)
        expect(page.locator(".prompt .caption")).to_have_text("Prompt, group 1 of step 3")
        run.finish()
        expect(page.locator(".live.done")).to_contain_text("finished", timeout=30_000)
        assert watched.errors == []
        polls = [url for url in watched.requests if "/news" in url]
        assert any("metrics=0" not in url for url in polls)


def test_checks_of_the_scores_share_one_chart_from_the_first_of_them_on(page: Page, tmp_path: Path) -> None:
    with RunFiles(tmp_path / "run") as files, serving([tmp_path / "run"]) as origin:
        files.log(1, {"critic/rewards/mean": 0.1})
        page.goto(f"{origin}/#/run?smooth=0")
        expect(page.locator(".recent tbody tr")).to_have_count(1)
        expect(page.locator("[data-chart=validity]")).to_have_count(0)
        for step in (2, 3):
            files.log(step, {"influence_trace/validity": 0.9, "influence_trace/validity_baseline": 0.2})
        chart = page.locator("[data-chart=validity]")
        expect(chart.locator("path.line")).to_have_count(2)
        expect(chart).to_contain_text("solid the scores, dashed |A|(1−p)")


def test_a_run_of_10_000_steps_is_drawn_column_by_column_and_keeps_its_peaks(page: Page, tmp_path: Path) -> None:
    peak, highest = 5_003, 4.0
    with RunFiles(tmp_path / "run") as files:
        for step in range(1, 10_001):
            files.log(step, {"critic/rewards/mean": highest if step == peak else step % 7 / 7})
    with serving([tmp_path / "run"]) as origin:
        page.goto(f"{origin}/#/run?smooth=0")
        chart = page.locator("[data-chart=reward]")
        d = chart.locator("path.line").get_attribute("d") or ""
        places = [tuple(map(float, place.split())) for place in d[1:].split("L")]
        box = chart.locator("svg").bounding_box()
        assert box is not None
        assert box["width"] < len(places) <= 4 * box["width"]
        assert places == sorted(places, key=lambda place: place[0])
        page.mouse.move(box["x"] + min(places, key=lambda place: place[1])[0], box["y"] + 80)
        step = int(chart.locator(".step-flag text").text_content() or 0)
        assert abs(step - peak) <= 10_000 / box["width"]  # the highest place of the curve is where the peak is


def test_a_run_that_starts_after_the_viewer_appears(page: Page, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "config.yaml").write_text("trainer: {total_steps: 3}\n")
    with serving([tmp_path / "first"], tmp_path) as origin:
        page.goto(f"{origin}/#/run")
        expect(page.locator(".empty")).to_contain_text("No metrics yet")
        write_run(tmp_path / "second", groups=2, steps=1)
        page.click(".run-picker > button")
        expect(page.locator(".run-menu a", has_text="second")).to_be_visible()


def test_a_server_that_went_away_is_told(page: Page, tmp_path: Path) -> None:
    run = SampleRun(tmp_path / "run", groups=2, total_steps=3)
    run.write_step(1)
    with serving([run.path]) as origin:
        page.goto(f"{origin}/#/run")
        expect(page.locator(".live")).to_contain_text("live")
    expect(page.locator(".live.lost")).to_contain_text("server does not answer")
    expect(page.locator("h1")).to_have_text("run")  # what was there stays there
    run.close()


def test_zero_influence_rows_are_explained(page: Page, tmp_path: Path) -> None:
    """Every group of the step has one constant reward: the influence trace holds no response at all."""
    run = SampleRun(tmp_path / "constant", groups=3, total_steps=1)
    groups = run.sample_groups(1)
    for group in groups:
        for response in group.responses:
            response.reward = 0.0
    run.write_step(1, groups)
    run.finish()
    with serving([run.path]) as origin:
        watched = Watched(page, origin)
        watched.open("#/step?step=1")
        expect(page.locator(".notice")).to_contain_text("No mixed group in this step")
        expect(page.locator("tr.skipped")).to_have_count(3)
        watched.open("#/group?step=1&group=0")
        expect(page.locator(".notice")).to_contain_text("all 8 rewards are equal")
        expect(page.locator(".row .slot-1 .t[class*=' e']").first).to_be_visible()
        watched.open("#/tokens?step=1")
        expect(page.locator(".notice")).to_contain_text("No influence in this step")
        expect(page.locator("td.c-count").first).to_be_visible()
        assert watched.errors == []


def test_tracing_that_was_off_is_explained(page: Page, tmp_path: Path) -> None:
    untraced = tmp_path / "untraced"
    files = RunFiles(untraced)
    files.write_config("trainer: {total_steps: 2, entropy_trace: {enable: false}, influence_trace: {enable: false}}\n")
    files.log(1, {"critic/rewards/mean": 0.25})
    entropy_only = write_run(tmp_path / "entropy-only", groups=8, steps=1, influence=False)
    view = load_step(open_run(entropy_only), 1)
    assert view is not None
    mixed = int(view.group[view.need("accepted").argmax()])
    with serving([untraced, entropy_only]) as origin:
        page.goto(f"{origin}/#/run?run=untraced")
        expect(page.locator(".charts-off")).to_contain_text("trainer.influence_trace.enable=true")
        page.goto(f"{origin}/#/group?run=untraced")
        expect(page.locator(".empty")).to_contain_text("Tracing was off in this run")
        page.goto(f"{origin}/#/group?run=entropy-only&group={mixed}")
        expect(page.locator(".notice")).to_contain_text("trainer.influence_trace.enable is off")
        expect(page.locator(".row .slot-1 .t[class*=' e']").first).to_be_visible()


def test_a_corrupt_step_does_not_take_the_others_with_it(page: Page, tmp_path: Path) -> None:
    run = write_run(tmp_path / "damaged", groups=3, steps=3)
    for kind in ("entropy_trace", "influence_trace"):
        file = run / kind / "steps" / "step_000002.npz"
        file.write_bytes(file.read_bytes()[:3000] + b"\x00garbage" + file.read_bytes()[3008:])
    (run / "influence_trace" / "steps" / "step_000003.npz").unlink()
    with serving([run]) as origin:
        page.goto(f"{origin}/#/step?step=2")
        expect(page.locator(".empty")).to_contain_text("Step 2 cannot be read")
        expect(page.locator(".empty")).to_contain_text("sha256")
        page.keyboard.press("]")
        expect(page.locator("h1")).to_have_text("Step 3")
        expect(page.locator(".notice.problem")).to_contain_text("step 3 of influence_trace was left out")
        expect(page.locator("tbody tr")).to_have_count(3)
        page.keyboard.press("[")
        page.keyboard.press("[")
        expect(page.locator("h1")).to_have_text("Step 1")
        page.goto(f"{origin}/#/run")
        expect(page.locator(".recent tbody tr")).to_have_count(3)


HOSTILE = [
    b"<img src=x onerror=\"window.hacked='img'\">",
    b"<script>window.hacked='script'</script>",
    b"</script><script>window.hacked='close'</script>",
    b"'\"><svg/onload=window.hacked='svg'>",
    b"javascript:window.hacked='js'",
    b"{{constructor.constructor('window.hacked=1')()}}",
    "\u202egnp.exe\u202c\u2028\u0000".encode(),
    b"\xff\xfe\xc3\x28",
    b"&lt;b&gt;&amp;#x41;",
]
RUN_NAME = "<img src=x onerror=window.hacked='name'>&\"'"


def hostile_run(folder: Path) -> Path:
    run = SampleRun(folder / RUN_NAME, groups=1, responses=2, total_steps=1)
    run.files.write_config("model: {path: \"<script>window.hacked='config'</script>\"}\n")
    run.files.write_token_bytes(TokenBytes(HOSTILE, [1 if i % 2 else 0 for i in range(len(HOSTILE))], Rules()))
    ids = list(range(len(HOSTILE)))
    made = [
        SampleResponse(ids, float(i), np.full(len(ids), 0.5), np.full(len(ids), -0.5), np.linspace(-1, 1, len(ids)), 1)
        for i in range(2)
    ]
    run.write_step(1, [SampleGroup(ids, made, ids)])
    run.files.log(1, {"<img src=x onerror=window.hacked='metric'>": 1.0})
    run.finish()
    return run.path


def test_hostile_text_stays_text(page: Page, tmp_path: Path) -> None:
    path = hostile_run(tmp_path)
    with serving([path]) as origin:
        watched = Watched(page, origin)
        for hash_ in ("#/run", "#/step", "#/group", "#/group?sel=0.2&find=<img", "#/tokens?min=1"):
            watched.open(hash_)
            page.reload()
            expect(page.locator("main > div")).to_be_visible()
            page.wait_for_timeout(100)
            assert page.evaluate("window.hacked") is None
            expect(page.locator("main img, main script, main [onerror], main [onload]")).to_have_count(0)
        watched.open("#/group")
        expect(page.locator(".row .slot-1 .t").first).to_have_text(HOSTILE[0].decode())
        watched.open("#/run")
        expect(page.locator("h1")).to_have_text(RUN_NAME)
        assert watched.errors == [] and watched.foreign_requests == []


def test_the_policy_would_stop_what_slips_through(page: Page, tmp_path: Path) -> None:
    """Even with a hole in our code: no inline script, no inline handler, no HTML from strings, no other host."""
    with serving([write_run(tmp_path / "run", groups=1, steps=1)]) as origin:
        page.goto(f"{origin}/#/run")
        expect(page.locator("h1")).to_be_visible()
        # in a task of its own: what the debugger runs directly may use eval
        attempts = """() => new Promise((resolve) => setTimeout(async () => {
          const results = {};
          try { document.body.innerHTML += '<b>x</b>'; results.html = 'allowed'; } catch { results.html = 'refused'; }
          const script = document.createElement('script');
          try { script.textContent = 'window.hacked = 1'; document.body.append(script); } catch {}
          results.script = window.hacked ? 'allowed' : 'refused';
          try { eval('window.hacked = 2'); } catch {}
          results.eval = window.hacked ? 'allowed' : 'refused';
          results.fetch = await fetch('http://192.0.2.1/').then(() => 'allowed', () => 'refused');
          const node = document.createElement('div');
          node.setAttribute('style', 'color: rgb(1, 2, 3)');
          document.body.append(node);
          results.style = getComputedStyle(node).color === 'rgb(1, 2, 3)' ? 'allowed' : 'refused';
          resolve(results);
        }))"""
        refused = dict.fromkeys(("html", "script", "eval", "fetch", "style"), "refused")
        assert page.evaluate(attempts) == refused
