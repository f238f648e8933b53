"""A command that wants a checkpoint takes a run; one that names what is not there is told what is."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradtrace.cli import main
from gradtrace.training.run import train
from tests.training import small

MISSING = "checkpoints/step_000007"
SWEEP = "sweep.influence.hessian_mode=inverse,identity"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exists")
    steps = ("trainer.total_steps=2", "trainer.checkpoint.every=1", "trainer.validation.every=0")
    return train(small.config(folder, *steps, "trainer.entropy_trace.enable=true")).run_dir


@pytest.mark.parametrize(
    "words",
    [
        ["probe", f"RUN/{MISSING}"],
        ["verify", f"RUN/{MISSING}"],
        ["select", f"RUN/{MISSING}", "RUN:1", "--validation", "val.jsonl"],
        ["ablate", "--checkpoint", f"RUN/{MISSING}", SWEEP],
        ["train", f"resume=RUN/{MISSING}", "REWARD"],
        ["doctor", "--model", f"RUN/{MISSING}"],
    ],
    ids=lambda words: words[0],
)
def test_a_missing_checkpoint_names_those_that_exist(
    words: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = f"reward.path={run_dir.parents[1] / 'reward.py'}:count_ones"
    given = [word.replace("RUN", str(run_dir)).replace("REWARD", reward) for word in words]
    assert main(given) == 2
    assert "step_000001, step_000002" in capsys.readouterr().err


def test_missing_steps_and_runs_name_those_that_exist(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "show", str(run_dir), "--kind", "entropy_trace", "--step", "9"]) == 2
    assert "it has 2, from 1 to 2" in capsys.readouterr().err
    assert main(["probe", str(run_dir.parent / "nothing")]) == 2
    assert f"{run_dir.parent} has demo" in capsys.readouterr().err
    assert main(["report", "nothing", "--runs-dir", str(run_dir.parent), "-o", "x.html"]) == 2
    assert "has demo" in capsys.readouterr().err


def test_a_run_stands_for_its_model(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", str(run_dir)]) == 0
    assert "gradient reaches all" in capsys.readouterr().out
    assert main(["doctor", "--model", str(run_dir), "credit=position"]) == 0
    assert "can be traced" in capsys.readouterr().out
