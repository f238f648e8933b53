"""Bad input ends with a clear error, and nothing that was there is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradtrace.cli import main
from gradtrace.config.loader import load_config
from gradtrace.errors import GradtraceError
from gradtrace.training.checkpoint import Checkpoints
from gradtrace.training.run import train
from tests.training import small
from tests.training.small import config, metrics, overrides


def dataset(folder: Path, rows: list[dict[str, str]], *more: str) -> list[str]:
    """A run on a file of prompts, with the tiny model of the demo's task."""
    train(config(folder, "trainer.total_steps=1", "trainer.name=base"))
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return overrides(
        folder,
        "task.name=dataset",
        f"model.path={folder / 'runs/base/policy'}",
        f"data.train=[{file}]",
        "data.validation_fraction=0",
        *more,
    )


def test_dataset_run_works_at_all(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": str(i)} for i in range(6)]
    outcome = train(load_config(dataset(tmp_path, rows)))
    assert outcome.finished and outcome.last_step == 4


@pytest.mark.parametrize(
    ("rows", "more", "words"),
    [
        ([], [], "no rows"),
        ([{"prompt": "1+1+1+1=", "answer": "4"}], ["data.max_prompt_length=4"], "none is left"),
        (
            [{"prompt": "1+1+1+1=", "answer": "4"}],
            ["data.max_prompt_length=4", "data.filter_overlong_prompts=false"],
            "more than data.max_prompt_length=4",
        ),
        ([{"prompt": "1+1=", "answer": "2"}], ["rollout.max_new_tokens=1000"], "more than the 512 positions"),
    ],
)
def test_unusable_data(
    tmp_path: Path,
    rows: list[dict[str, str]],
    more: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", *dataset(tmp_path, rows, *more)]) == 2
    printed = capsys.readouterr().err
    assert words in printed and "Traceback" not in printed


@pytest.mark.parametrize("folder", ["missing", "empty"])
def test_missing_model(tmp_path: Path, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    arguments = overrides(tmp_path, f"model.path={tmp_path / folder}")
    assert main(["train", *arguments]) == 2
    assert f"model.path={tmp_path / folder}" in capsys.readouterr().err


FAILING = {
    "raises": ("raise KeyError('oops')", "KeyError"),
    "nan": ("return float('nan')", "not a finite number"),
    "text": ("return 'good'", "not a finite number"),
}


@pytest.mark.parametrize("kind", FAILING)
def test_failing_reward_saves_the_run_before_the_failed_step(tmp_path: Path, kind: str) -> None:
    """From the third step on the reward fails; mended, the run goes on as if nothing had happened."""
    body, words = FAILING[kind]
    straight = train(config(tmp_path, "trainer.validation.every=0")).run_dir
    source = (tmp_path / "reward.py").read_text()
    failing = source.replace("    return", f"    calls.append(1)\n    if len(calls) > 2 * 12: {body}\n    return")
    settings = config(tmp_path, "trainer.validation.every=0", "trainer.name=broken")
    (tmp_path / "reward.py").write_text("calls = []\n" + failing)
    with pytest.raises(GradtraceError) as caught:
        train(settings)
    message = str(caught.value)
    run_dir = tmp_path / "runs/broken"
    assert words in message and "Step 3" in message and f"resume={run_dir}" in message
    assert "reward.py:count_ones" in message and "the response" in message and "'prompt'" in message
    latest = Checkpoints(run_dir).latest()
    assert latest is not None and latest.name == "step_000002"
    (tmp_path / "reward.py").write_text(source)
    train(small.resume(run_dir))
    assert metrics(run_dir) == metrics(straight)


def test_run_folder_is_never_overwritten(tmp_path: Path) -> None:
    first = train(config(tmp_path, "trainer.total_steps=1")).run_dir
    second = train(config(tmp_path, "trainer.total_steps=1")).run_dir
    assert (first.name, second.name) == ("demo", "demo_2")
    assert len(metrics(first)) == len(metrics(second))


def test_missing_tracker_is_named(tmp_path: Path) -> None:
    with pytest.raises(GradtraceError, match=r"trackio.*pip install"):
        train(config(tmp_path, "trainer.logger=[trackio]"))


def test_tensorboard_gets_the_metrics(tmp_path: Path) -> None:
    run_dir = train(config(tmp_path, "trainer.total_steps=1", "trainer.logger=[tensorboard]")).run_dir
    assert any((run_dir / "tensorboard").glob("events.out.tfevents.*"))
