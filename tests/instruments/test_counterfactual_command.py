"""`gradtrace counterfactual` on a real run: what it stores, how it goes on after a kill, and what it refuses."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gradtrace
from gradtrace.cli import main
from gradtrace.instruments.counterfactual import COUNTERFACTUAL
from gradtrace.instruments.counterfactual.columns import stored_groups
from gradtrace.trace.run_files import acquire_lock, release_lock
from gradtrace.training.run import train
from tests.training import small

DEADLY = """
import os, signal
judged = 0
def count_ones(response, item):
    global judged
    judged += 1
    if judged == {deadly}:
        os.kill(os.getpid(), signal.SIGKILL)
    return response.count("1") + 0.1 * len(response)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("counterfactual")
    more = (
        "trainer.entropy_trace.enable=true",
        "trainer.influence_trace.enable=true",
        "trainer.checkpoint.every=2",
    )
    return train(small.config(folder, *more)).run_dir


@pytest.fixture
def run_dir(made: Path, tmp_path: Path) -> Path:
    """A copy to write in; the reward stays where it was."""
    return Path(shutil.copytree(made, tmp_path / "runs" / "copy"))


def command(run_dir: Path, made: Path, *more: str) -> list[str]:
    reward = f"reward.path={made.parents[1] / 'reward.py'}:count_ones"
    return ["counterfactual", str(run_dir), "--step", "3", reward, "rollout.max_batch_tokens=400", *more]


def samples(run_dir: Path) -> list[tuple[int, list[int], float]]:
    (group,) = stored_groups(run_dir, 3)
    return [(sample.node, sample.ids, sample.reward) for sample in group.measurement.samples]


def test_it_stores_a_trace_that_everything_reads(
    made: Path, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(run_dir, made, "--k", "6")) == 0
    shown = capsys.readouterr().out
    assert "step_000002: those that wrote the responses of step 3" in shown and "V(prompt)" in shown
    run = gradtrace.open_run(run_dir)
    step = run.step(COUNTERFACTUAL, 3)
    assert step.meta["measured"][0]["checkpoint"] == "step_000002" and step.meta["measured"][0]["steps_away"] == 0
    assert np.isfinite(step["delta_v"]).all() and (step["delta_v_stderr"] >= 0).all()
    original = run.step("entropy_trace", 3)
    group = original.group(0).responses
    np.testing.assert_array_equal(step["row"], original["row"][group])
    np.testing.assert_array_equal(step["reward"], original["reward"][group])
    assert main(["trace", "ls", str(run_dir), "--verify"]) == 0
    assert main(["trace", "show", str(run_dir), "--kind", COUNTERFACTUAL, "--color", "never"]) == 0
    assert "ΔV" in capsys.readouterr().out
    assert main(["trace", "export", str(run_dir), str(tmp_path / "t.csv"), "--kind", COUNTERFACTUAL]) == 0
    assert "delta_v_stderr" in (tmp_path / "t.csv").read_text()


def test_after_a_kill_it_goes_on_as_if_nothing_had_happened(made: Path, run_dir: Path, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    words = ["counterfactual", str(run_dir), "--step", "3", f"reward.path={reward}:count_ones"]
    words += ["rollout.max_batch_tokens=400", "--k", "8"]
    reward.write_text(DEADLY.format(deadly=60))
    killed = subprocess.run([sys.executable, "-m", "gradtrace.cli", *words], capture_output=True)
    assert killed.returncode == -9
    begun = len(samples(run_dir))
    assert begun > 0
    reward.write_text(DEADLY.format(deadly=-1))
    assert main(words) == 0
    resumed = samples(run_dir)
    assert len(resumed) > begun
    assert main([*words, "--fresh"]) == 0
    assert samples(run_dir) == resumed


def test_asked_again_it_adds_what_is_missing_and_keeps_other_groups(made: Path, run_dir: Path) -> None:
    assert main(command(run_dir, made, "--group", "0", "--k", "4", "--tokens", "0-2")) == 0
    few = samples(run_dir)
    assert main(command(run_dir, made, "--group", "0", "--k", "4", "--tokens", "0-2")) == 0
    assert samples(run_dir) == few
    assert main(command(run_dir, made, "--group", "0", "--k", "8")) == 0
    more = stored_groups(run_dir, 3)[0].measurement.samples
    assert [(s.node, s.ids, s.reward) for s in more[: len(few)]] == few and len(more) > 2 * len(few)
    assert main(command(run_dir, made, "--group", "2", "--k", "4", "--response", "1")) == 0
    groups = stored_groups(run_dir, 3)
    assert [group.group_id for group in groups] == [0, 2] and len(groups[0].measurement.samples) == len(more)


def test_a_budget_ends_it_and_what_was_sampled_is_kept(
    made: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(run_dir, made, "--k", "1000", "--budget", "0.01")) == 0
    assert "The same command goes on" in capsys.readouterr().out
    assert 0 < len(samples(run_dir)) < 1000


def test_code_that_came_with_a_run_is_not_executed(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["counterfactual", str(run_dir), "--step", "3"]) == 2
    assert "reward.path" in capsys.readouterr().err
    assert not (run_dir / COUNTERFACTUAL).exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", "9"], "has 1 to 4"),
        (["--group", "7"], "groups 0 to 3"),
        (["--response", "5"], "0 to 2"),
        (["--tokens", "best"], "entropy, influence"),
        (["--k", "0"], "at least 1"),
        (["--budget", "soon"], "90s"),
        (["--model", "/nowhere"], "config.json"),
        (["rollout.temperature=0"], "the same response"),
    ],
)
def test_refusals_say_what_there_is(
    made: Path, run_dir: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(run_dir, made, *words)) == 2
    assert message in capsys.readouterr().err


def test_other_settings_do_not_mix_with_what_is_stored(
    made: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(run_dir, made, "--k", "2", "--tokens", "0")) == 0
    again = command(run_dir, made, "--k", "2", "--tokens", "0", "rollout.top_p=0.9")
    assert main(again) == 2 and "top_p=1.0" in capsys.readouterr().err
    assert main([*again, "--fresh"]) == 0


def test_two_do_not_write_at_once(made: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / COUNTERFACTUAL).mkdir()
    words = command(run_dir, made, "--k", "2", "--tokens", "0")
    acquire_lock(run_dir / COUNTERFACTUAL)
    try:
        other = subprocess.run([sys.executable, "-m", "gradtrace.cli", *words], capture_output=True, text=True)
    finally:
        release_lock(run_dir / COUNTERFACTUAL)
    assert other.returncode == 2 and "is being written by process" in other.stderr


def test_without_checkpoints_it_says_what_to_do(made: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    shutil.rmtree(run_dir / "policy")
    assert main(command(run_dir, made)) == 2
    assert "trainer.checkpoint.every" in capsys.readouterr().err
