"""`gradtrace train recipe=calculator`: a policy that learns to call a tool, and traces of what it did in each turn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gradtrace import open_run
from gradtrace.cli import main
from gradtrace.config.loader import load_config
from gradtrace.tasks.calculator import VOCABULARY
from gradtrace.trace.step import Step
from gradtrace.training.run import train
from tests.e2e.test_demo import curve
from tests.viewer.serving import Watched, chromium, serving

STEPS = 8


UNITS = {"nats": 1.0, "m-nats": 1e-3, "µ-nats": 1e-6, "n-nats": 1e-9}
"""As the viewer writes them."""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calculator")
    settings = (
        *("recipe=calculator", f"trainer.total_steps={STEPS}", f"trainer.runs_dir={folder}"),
        *(
            "trainer.validation.every=0",
            "trainer.checkpoint.every=4",
        ),
    )
    return train(load_config(list(settings))).run_dir


def texts(step, r: int) -> str:
    return "".join(VOCABULARY[t] for t in step.tokens(r)["token_id"])


def test_reward_rises(run_dir: Path) -> None:
    rewards = curve(run_dir)
    assert len(rewards) == STEPS and np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.15, rewards


@pytest.mark.parametrize("kind", ["entropy_trace", "influence_trace", "blame"])
def test_what_the_tool_wrote_is_shown_and_never_scored(run_dir: Path, kind: str) -> None:
    step = open_run(run_dir).step(kind, 8)
    assert (~step["loss_mask"]).any()
    for r in range(step.n_responses):
        ids, own = step.tokens(r)["token_id"], step.written(r)
        parts = step.segments(r)
        ends = [*(part.start for part in parts[1:]), len(ids)]
        for part, end in zip(parts, ends, strict=True):
            text = "".join(VOCABULARY[t] for t in ids[part.start : end])
            assert (part.role == "tool") == (not own[part.start])
            assert part.role != "tool" or text.startswith("<result>")  # it may write such tags itself
            assert part.tool == ("calc" if part.role == "tool" else "")
        scores = [v for n, v in step.tokens(r).items() if v.dtype == np.float32]
        assert scores and all(np.array_equal(np.isnan(values), ~own) for values in scores)


@pytest.fixture(scope="module")
def measured(run_dir: Path) -> Step:
    """ΔV of a group of step 5, measured twice: what is there is read again, and more added."""
    for k in ("4", "6"):
        assert main(["counterfactual", str(run_dir), "--step", "5", "--k", k, "--tokens", "all"]) == 0
    return open_run(run_dir).step("counterfactual", 5)


def test_what_was_written_is_worth_the_reward_and_tool_results_have_no_worth(measured: Step) -> None:
    """V of the prompt and the ΔV of the policy's tokens add up to the reward, over tool results."""
    called = 0
    for r in range(measured.n_responses):
        tokens, own = measured.tokens(r), measured.written(r)
        assert np.array_equal(np.isnan(tokens["delta_v"]), ~own)
        total = measured["prompt_value"][measured["group"][r]] + np.nansum(tokens["delta_v"])
        assert total == pytest.approx(float(measured["reward"][r]), abs=1e-4)
        called += int(not own.all())
    assert called


def test_the_viewer_shows_a_chat_with_tool_results_folded_and_a_strip_of_turns(run_dir: Path, measured: Step) -> None:
    step = open_run(run_dir).step("influence_trace", 5)
    group = int(measured["group_id"][0])
    members = np.flatnonzero(step["group_id"][step["group"]] == group).tolist()
    place, r = next((i, r) for i, r in enumerate(members) if len(step.segments(r)) == 3)
    with serving([run_dir]) as origin, chromium() as browser:
        watched = Watched(browser.new_page(), origin)
        page = watched.open(f"#/group?step=5&group={group}&view=one&by=turn")
        page.wait_for_selector(".slot-1 .segment.tool")
        tool = page.locator(".slot-1 details.segment.tool").first
        assert tool.get_attribute("open") is None and "tool calc" in tool.inner_text()
        tool.locator("summary").click()
        classes = tool.locator(".t").evaluate_all("all => all.map(span => span.className)")
        assert len(classes) >= 3 and all("ms" in name.split() for name in classes)
        assert page.locator(".slot-1 .segment .author").first.inner_text() == "policy, turn 1"
        strip = page.locator(f'.turns[aria-label="Turns of r{place}"] button')
        assert strip.count() == 2 and "ΔV" in strip.first.inner_text()
        shown = strip.first.inner_text().split()
        assert shown[:3] == ["turn", "1", "Σ"]
        scores = step.influence(r)
        total = np.nansum(scores[: step.segments(r)[1].start])
        number, unit = shown[3].replace("−", "-").replace(",", ""), UNITS[shown[4]]
        assert float(number) * unit == pytest.approx(total, abs=0.02 * float(np.nanmax(np.abs(scores))))
        assert not watched.errors


def test_a_line_for_every_turn(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = open_run(run_dir).step("influence_trace", 8)
    r = next(r for r in range(step.n_responses) if not step.written(r).all())
    group = str(int(step["group"][r]))
    assert main(["trace", "show", str(run_dir), "--step", "8", "--group", group, "--by", "turn"]) == 0
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if "<result>" in line]
    assert lines and all(line.split()[1] == "–" for line in lines), "tool results have no score"
