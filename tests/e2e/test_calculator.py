"""`gradtrace train recipe=calculator`: a policy that learns to call a tool, and traces of what it did in each turn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gradtrace import open_run
from gradtrace.cli import main
from gradtrace.config_loader import load_config
from gradtrace.tasks.calculator import VOCABULARY
from gradtrace.training.run import train
from tests.e2e.test_demo import curve

STEPS = 8


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calculator")
    settings = (
        *("recipe=calculator", f"trainer.total_steps={STEPS}", f"trainer.runs_dir={folder}"),
        *(
            "trainer.validation.every=0",
            "trainer.checkpoint.every=4",
            "trainer.influence_trace.write_every=4",
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


def test_tokens_of_a_call_are_worth_something_and_results_have_no_worth_of_their_own(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """V of the prompt and the ΔV of what the policy wrote add up to the reward, over tool results."""
    assert main(["counterfactual", str(run_dir), "--step", "5", "--k", "4", "--tokens", "all"]) == 0
    step = open_run(run_dir).step("counterfactual", 5)
    called = 0
    for r in range(step.n_responses):
        tokens, own = step.tokens(r), step.written(r)
        assert np.array_equal(np.isnan(tokens["delta_v"]), ~own)
        total = step["prompt_value"][step["group"][r]] + np.nansum(tokens["delta_v"])
        assert total == pytest.approx(float(step["reward"][r]), abs=1e-4)
        called += int(not own.all())
    assert called
    # What was measured is read again, and more of it added.
    assert main(["counterfactual", str(run_dir), "--step", "5", "--k", "6", "--tokens", "all"]) == 0


def test_a_line_for_every_turn(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = open_run(run_dir).step("influence_trace", 8)
    r = next(r for r in range(step.n_responses) if not step.written(r).all())
    group = str(int(step["group"][r]))
    assert main(["trace", "show", str(run_dir), "--step", "8", "--group", group, "--by", "turn"]) == 0
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if "<result>" in line]
    assert lines and all(line.split()[1] == "+nan" or line.split()[1] == "nan" for line in lines)
