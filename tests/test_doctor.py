"""`gradtrace doctor` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradtrace import open_run
from gradtrace.cli import main
from gradtrace.commands.doctor.health import examine
from gradtrace.trace.reader import RunReader
from gradtrace.trace.run_files import RunFiles
from gradtrace.trace.writer import TraceWriter
from gradtrace.training.run import train
from tests.attribution.models import tiny_model
from tests.training import small
from tests.viewer.sample import SampleRun


@pytest.fixture
def saved_model(tmp_path: Path) -> str:
    tiny_model("llama").float().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_versions_are_shown_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "torch" in shown and "threads" in shown and "device" in shown


def test_a_healthy_model(saved_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", saved_model]) == 0
    shown = capsys.readouterr().out
    assert "gradient reaches all" in shown and "memory" in shown and "copy of the trained weights" in shown
    assert main(["doctor", "--model", saved_model, "hessian_mode=identity"]) == 0
    shown = capsys.readouterr().out
    assert "healthy" in shown and "14 selected layers" in shown and "memory" in shown


def test_every_knob_of_the_trace_counts_in_the_estimate(saved_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    def estimate(*knobs: str) -> str:
        small_batch = ("--responses", "2", "--tokens", "4")
        assert main(["doctor", "--model", saved_model, *small_batch, *knobs]) == 0
        return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("memory"))

    inverse = ("hessian_mode=inverse", "credit=position", "projection_dim_factor=1")
    dense = estimate(*inverse, "trainer.influence_trace.solver=dense")
    assert len({estimate(), estimate(*inverse), dense, estimate(*inverse, "solver=dense", "max_hessian_dim=16")}) == 4
    identity = "hessian_mode=identity"
    assert estimate(identity, "max_modules=2") != estimate(identity)
    assert estimate(identity) != estimate(identity, "max_tokens_per_response=3")
    assert main(["doctor", "--model", saved_model, "max_module=2"]) == 2
    assert "max_modules" in capsys.readouterr().err
    assert main(["doctor", "--model", saved_model, "max_modules=many"]) == 2
    assert main(["doctor", "max_modules=2"]) == 2


def test_captures_are_shown_module_by_module(
    saved_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--model", saved_model, "hessian_mode=identity", "max_modules=2"]) == 0
    assert "1 fw, 1 bw" in capsys.readouterr().out
    factors = "trainer.influence_trace.hessian_mode=identity"
    traced = ("trainer.influence_trace.enable=true", factors, "trainer.total_steps=1", "trainer.validation.every=0")
    run_dir = train(small.config(tmp_path, *traced)).run_dir
    found = open_run(run_dir).step("influence_trace", 1).meta["captures"]
    assert found and all(forward == backward > 0 for forward, backward in found.values())
    main(["doctor", str(run_dir)])
    shown = capsys.readouterr().out
    assert f"in each of {len(found)} modules (step 1): {next(iter(found))}" in shown


def test_a_filter_that_matches_nothing_is_a_problem(saved_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", saved_model, "hessian_mode=identity", "--filter", "c_attn"]) == 1
    assert "matches none" in capsys.readouterr().out


def test_a_missing_model_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", str(tmp_path / "nowhere")]) == 2
    error = capsys.readouterr().err
    assert "nowhere: there is no such folder" in error and error.count("\n") == 1


# ---------------------------------------------------------------- doctor RUN


def log_run(path: Path, steps: int = 20, **metrics: Any) -> RunReader:
    """A run whose metrics are numbers, or functions of the step."""
    with RunFiles(path) as files:
        for step in range(1, steps + 1):
            named = {name.replace("__", "/"): value for name, value in metrics.items()}
            files.log(step, {name: value(step) if callable(value) else value for name, value in named.items()})
    return open_run(path)


def words(run: RunReader) -> str:
    return "\n".join(finding.what for finding in examine(run))


def test_a_healthy_run_has_no_findings(tmp_path: Path) -> None:
    run = log_run(
        tmp_path / "run",
        actor__entropy=lambda step: 0.8 - 0.01 * step,
        critic__rewards__mean=lambda step: 0.2 + 0.03 * step,
        actor__skipped_updates=0.0,
        rollout__groups_constant=0.2,
    )
    assert examine(run) == []
    assert main(["doctor", str(run.path)]) == 0


@pytest.mark.parametrize(
    ("metrics", "expected", "is_problem"),
    [
        ({"actor__entropy": lambda step: 0.9 * 0.7**step}, "Entropy collapsed: from", False),
        ({"actor__entropy": lambda step: 0.1 * 1.2**step}, "Entropy rose from", False),
        ({"rollout__groups_constant": 0.8, "critic__rewards__mean": 0.05}, "80% of the groups", False),
        ({"actor__skipped_updates": lambda step: float(step in (3, 7))}, "2 updates were skipped", True),
        ({"critic__rewards__mean": 0.3}, "The reward did not rise", False),
        ({"response_length__clip_ratio": 0.6}, "60% of the responses", False),
        (
            {"actor__grad_norm": lambda step: 1000.0 if step == 9 else 1.0},
            "times its median (1) in step 9",
            False,
        ),
        (
            {"influence_trace__debug_write_errors": lambda step: float(step > 5)},
            "debug_write_errors is 1",
            True,
        ),
        (
            {"influence_trace__rows_emitted": 0.0, "influence_trace__uid_mixed": 4.0},
            "no rows in 20 steps, the first is 1, although groups were mixed",
            True,
        ),
        (
            {"influence_trace__rows_emitted": 0.0, "influence_trace__uid_mixed": 0.0},
            "no group had different rewards",
            False,
        ),
        (
            {"influence_trace__label_r2": lambda step: 0.99 if step > 18 else 0.5},
            "scores repeat the labels in step",
            False,
        ),
        ({"tracin__fallback": 1.0}, "fell back to the top fraction in 100% of the steps", False),
        (
            {
                "entropy_probe__delta_h_predicted": -0.01,
                "entropy_probe__delta_h_measured": -0.03,
                "entropy_probe__stderr_difference": 0.0001,
            },
            "too large updates for a linear prediction",
            False,
        ),
    ],
)
def test_what_is_wrong_with_a_run_is_said(
    tmp_path: Path, metrics: dict[str, Any], expected: str, is_problem: bool
) -> None:
    run = log_run(tmp_path / "run", **metrics)
    finding = next(finding for finding in examine(run) if expected in finding.what)
    assert finding.is_problem == is_problem
    assert main(["doctor", str(run.path)]) == int(is_problem)


def test_a_solved_task_may_have_little_entropy(tmp_path: Path) -> None:
    run = log_run(tmp_path / "run", actor__entropy=lambda step: 0.9 * 0.7**step, critic__rewards__mean=0.99)
    assert "what a solved task looks like" in words(run)


def test_a_run_too_short_for_trends_is_not_judged(tmp_path: Path) -> None:
    run = log_run(tmp_path / "run", steps=3, actor__entropy=0.001, critic__rewards__mean=0.1)
    assert examine(run) == []


def test_damaged_files_and_tracin_remarks_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample = SampleRun(tmp_path / "run", groups=4, total_steps=2)
    for step in (1, 2):
        sample.write_step(step)
    sample.finish()
    stored = open_run(sample.path).step("tracin", 2)
    stored_remarks = stored.meta["diagnosis"]
    file = next((sample.path / "entropy_trace/steps").glob("*1.npz"))
    file.write_bytes(file.read_bytes()[:-20])
    assert main(["doctor", str(sample.path)]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "problem" in printed and "step_000001.npz" in printed
    assert all(" ".join(sentence.split()) in printed for sentence in stored_remarks)


def test_scores_without_a_stored_diagnosis_are_diagnosed_now(tmp_path: Path) -> None:
    sample = SampleRun(tmp_path / "run", groups=4, total_steps=1, influence=False, probe=False)
    sample.write_step(1)
    sample.finish()
    stored = open_run(sample.path).step("tracin", 1)
    columns = {name: stored[name] for name in stored.columns}
    columns["score"] = np.where(np.isfinite(columns["score"]), 0.0, np.nan)
    writer = TraceWriter(sample.path, "tracin")
    writer.write(1, columns, {"val_norm": 0.5})
    writer.close()
    assert "Every score is zero" in words(open_run(sample.path))


def test_a_run_without_a_step_is_a_problem_and_a_probe_without_metrics_is_none(tmp_path: Path) -> None:
    assert "never finished a step" in words(log_run(tmp_path / "empty", steps=0))
    sample = SampleRun(tmp_path / "probed", groups=2, total_steps=1)
    sample.write_step(1)
    sample.finish()
    (sample.path / "metrics.jsonl").unlink()
    assert "never finished" not in words(open_run(sample.path))


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path)]) == 2
    assert "no run at" in capsys.readouterr().err


# ---------------------------------------------------------------- doctor --task


def test_rows_of_a_data_set_are_checked_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"prompt": "p", "data_source": "mbpp", "code": "def f(x): return x * x", "test_list": ["assert f(3) == 9"]}
    rows = [
        row,
        {**row, "test_list": ["f(3) == 9"]},
        {**row, "code": "def f(x): return x"},
        {**row, "test_list": [["assert f(3) == 9"]]},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert main(["doctor", "--task", str(file)]) == 1
    shown = capsys.readouterr().out
    assert f"2 of 4 rows of {file} can be judged: reward.name=code" in shown
    assert "row 1 has a test that tests nothing" in shown and "`test_list[0]`" in shown
    if "isolates no programs" not in shown:
        assert "2 reference solutions were run, 1 pass" in shown and "row 2: its own solution" in shown
    file.write_text(json.dumps(row) + "\n")
    assert main(["doctor", "--task", str(file)]) == 0
    assert "no row is wrong" in capsys.readouterr().out


def test_rows_of_an_unknown_data_set_need_a_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "p", "test_list": ["assert f(3) == 9"]}\n')
    assert main(["doctor", "--task", str(file)]) == 2
    assert "--reward code" in capsys.readouterr().err
    assert main(["doctor", "--task", str(file), "--reward", "code"]) == 0
    assert main(["doctor", "--reward", "code"]) == 2
