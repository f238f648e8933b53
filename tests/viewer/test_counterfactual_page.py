"""Counterfactual values on the group page, without a model at hand; and numbers by sentence and line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, expect

from gradtrace import open_run
from gradtrace.commands.report import make_report
from gradtrace.commands.trace_show import aggregate, units_of
from gradtrace.instruments.counterfactual import COUNTERFACTUAL
from gradtrace.instruments.counterfactual.columns import MeasuredGroup, write_groups
from gradtrace.instruments.counterfactual.tree import Measurement, PrefixTree, Sample
from gradtrace.trace.writer import TraceWriter
from tests.trace.test_units import TEXTS
from tests.viewer.conftest import write_run
from tests.viewer.serving import Watched, serving

STEP, GROUP = 1, 0


def measure(run_dir: Path) -> Measurement:
    """Values of a sample run's first group: all tokens are equally likely, and two samples leave at its start."""
    step = open_run(run_dir).step("entropy_trace", STEP)
    members = step.group(GROUP).responses
    responses = [step.tokens(r)["token_id"].tolist() for r in members]
    size = len(PrefixTree(responses))
    group = Measurement(
        prompt=step.group(GROUP).prompt_ids.tolist(),
        responses=responses,
        rewards=step["reward"][members].astype(float),
        ended=np.ones(len(members), bool),
        log_probs=[np.log(np.full(len(response), 0.1)) for response in responses],
        measured=np.ones(size, bool),
        samples=[],
    )
    strange = max(max(response) for response in responses)
    group.samples += [Sample(0, [strange, strange], reward, True) for reward in (1.0, 0.0)]
    columns = {"row": step["row"][members], "finished": np.ones(len(members), bool)}
    about = {"checkpoint": "step_000001", "checkpoint_step": 1, "steps_away": 1}
    with TraceWriter(run_dir, COUNTERFACTUAL, on_error="raise") as writer:
        write_groups(writer, STEP, [MeasuredGroup(int(step["group_id"][GROUP]), group, about, columns)], {})
    return group


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("values") / "run", seed=1, groups=3, steps=2)


@pytest.fixture(scope="module")
def measured(run_dir: Path) -> Measurement:
    return measure(run_dir)


@pytest.fixture
def page(browser: Browser, run_dir: Path) -> Iterator[Watched]:
    with serving([run_dir]) as origin:
        watched = Watched(browser.new_page(viewport={"width": 1440, "height": 900}), origin)
        yield watched
        watched.page.close()
        assert watched.errors == []


def test_values_are_a_channel_a_line_and_what_follows_a_token(page: Watched, measured: Measurement) -> None:
    shown = page.open(f"#/group?step={STEP}&group={GROUP}&right=delta_v")
    expect(shown.locator(".value-curve")).to_have_count(len(measured.responses))
    delta = measured.values().delta[measured.tree.paths[0]]
    strongest = int(np.nanargmax(np.abs(delta)))
    cell = shown.locator(".row[aria-label^='Response r0,'] .slot-1 .t").nth(strongest)
    sign = "p" if delta[strongest] > 0 else "n"
    assert any(name.startswith(sign) and name[1:].isdigit() for name in (cell.get_attribute("class") or "").split())
    cell.click()
    expect(shown.locator(".dock dl").first).to_contain_text("ΔV")
    expect(shown.locator(".following")).to_contain_text("2 continuations from step_000001, 1 steps after")
    expect(shown.locator(".side-of")).to_have_count(2)
    expect(shown.locator("button.resample")).to_be_hidden()


def test_where_nothing_was_measured_the_page_says_what_to_run(page: Watched, run_dir: Path) -> None:
    shown = page.open("#/group?step=1&group=1&sel=0.2")
    expect(shown.locator(".following")).to_contain_text(
        f"gradtrace counterfactual {run_dir} --step 1 --group 1 --response 0 --tokens 2"
    )
    expect(shown.locator(".following")).to_contain_text("--resample")
    expect(shown.locator(".value-curve")).to_have_count(0)


def test_values_of_other_responses_are_not_shown(page: Watched, tmp_path: Path, browser: Browser) -> None:
    """A run that was trained anew from an earlier checkpoint has other responses under the same number."""
    other = write_run(tmp_path / "run", seed=1, groups=3, steps=2)
    measure(other)
    again = write_run(tmp_path / "again", seed=9, groups=3, steps=2)
    (other / COUNTERFACTUAL).rename(again / COUNTERFACTUAL)
    with serving([again]) as origin:
        shown = browser.new_page()
        shown.goto(f"{origin}/#/group?step={STEP}&group={GROUP}")
        expect(shown.locator(".row").first).to_be_visible()
        expect(shown.locator(".value-curve")).to_have_count(0)
        shown.close()


def test_a_report_holds_the_values(measured: Measurement, run_dir: Path) -> None:
    chosen = make_report([run_dir], max_groups=0).page
    assert f'"runs/0/steps/{STEP}/groups/{GROUP}"' in chosen  # what was measured comes without being asked for
    report = make_report([run_dir], steps=[STEP], groups=[GROUP])
    assert f"groups/{GROUP}/counterfactual" in report.page


def test_sentences_are_those_of_the_terminal(page: Watched) -> None:
    shown = page.open("#/run")
    for by in ("sentence", "line"):
        script = """async ([texts, by]) => {
            const { unitsOf, aggregated } = await import("/static/js/group/units.js");
            const response = { pieces: texts.map((text) => ({ text })), start: 0 };
            const values = Float32Array.from(texts, (_, index) => index);
            const group = { responses: [response] };
            const of = (channel) => Array.from(aggregated(group, channel, values, by));
            return JSON.stringify([Array.from(unitsOf(response, by)), of("delta_v"), of("entropy")]);
        }"""
        units, sums, means = json.loads(shown.evaluate(script, [TEXTS, by]))
        expected, values = units_of(TEXTS, by), np.arange(len(TEXTS), dtype=float)
        assert units == expected.tolist()
        np.testing.assert_allclose(sums, aggregate("delta_v", values, expected)[expected])
        np.testing.assert_allclose(means, aggregate("entropy", values, expected)[expected], rtol=1e-6)


def test_colours_by_line_stay_in_the_address(page: Watched) -> None:
    shown = page.open("#/group?step=2&group=0&view=one&right=entropy")
    shown.get_by_role("radio", name="line").click()
    assert "by=line" in shown.evaluate("location.hash")
    tokens = shown.locator(".row[aria-label^='Response r0,'] .slot-1 .t")
    classes = {(tokens.nth(i).get_attribute("class") or "").split()[-1] for i in range(tokens.count() - 1)}
    tokens.first.hover()
    expect(shown.locator(".readout")).to_contain_text("line: Entropy")
    assert len(classes) == 1, "a chain is one line, so that all its tokens have its colour"
