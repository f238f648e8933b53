"""A GRPOTrainer on two real processes (torchrun, gloo): one trace, the same as one process makes of the same batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradtrace
from gradtrace.trace.reader import RunReader
from tests.integrations import trl_two_ranks
from tests.integrations.trl_two_ranks import RUNS, run

ROOT = Path(__file__).parents[2]
KINDS = {
    "default": {"influence_trace", "entropy_trace", "blame"},
    "not_measured": {"influence_trace", "entropy_trace", "blame"},
    "curvature": {"influence_trace", "entropy_trace", "blame"},
    "several_steps": {"influence_trace", "entropy_trace"},
    "selection": {"influence_trace", "entropy_trace", "blame", "tracin"},
    "soft": {"influence_trace", "entropy_trace", "blame", "tracin"},
}
OWN_OF_THE_MACHINE = ("timing_s/", "trl/step_time", "perf/")
"""Metrics that are about speed."""
OF_THE_PASSES = (
    "actor/kl_loss",
    "trl/entropy",
    "trl/clip_ratio",
    "debug_captures",
    "debug_forward",
    "debug_backward",
    "debug_bytes",
    "debug_solver",
    "label_r2",
)
"""Metrics that count or average over passes, which are others on two processes, or that each takes by itself."""


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of all runs on two processes, and what each of them left."""
    folder = tmp_path_factory.mktemp("two")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, trl_two_ranks.__file__, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return folder, [torch.load(folder / f"rank_{rank}.pt") for rank in (0, 1)]


def assert_same_files(
    ours: RunReader, alone: RunReader, kinds: set[str], steps: list[int], *but: str, tolerance: float = 1e-5
) -> None:
    assert ours.verify() == [] and set(ours.kinds()) == kinds
    for kind in kinds:
        assert list(ours.steps(kind)) == steps
        for number in steps:
            found, expected = ours.step(kind, number), alone.step(kind, number)
            assert set(found.columns) == set(expected.columns)
            for name in set(expected.columns) - set(but):
                a, b = np.asarray(found[name]), np.asarray(expected[name])
                if b.dtype.kind != "f":
                    np.testing.assert_array_equal(a, b, err_msg=f"{kind} {number} {name}")
                    continue
                size = float(np.nanmax(np.abs(b), initial=0.0))
                np.testing.assert_allclose(
                    a, b, rtol=10 * tolerance, atol=tolerance * size, err_msg=f"{kind} {number} {name}"
                )


def assert_same_metrics(ours: RunReader, alone: RunReader) -> None:
    lines, expected = ours.metrics()[0], alone.metrics()[0]
    assert len(lines) == len(expected) > 0
    for found, wanted in zip(lines, expected, strict=True):
        names = [
            name
            for name in wanted
            if not name.startswith(OWN_OF_THE_MACHINE) and not any(part in name for part in OF_THE_PASSES)
        ]
        assert {"critic/rewards/mean", "actor/grad_norm", "actor/entropy"} <= set(names) <= set(found)
        for name in names:
            assert found[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_write_what_one_writes_of_the_same_batch(
    name: str, launched: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    run(name, tmp_path, processes=1)
    ours, alone = (gradtrace.open_run(folder / name / "run") for folder in (launched[0], tmp_path))
    several = name == "several_steps"
    assert_same_files(ours, alone, KINDS[name], [1, 2], *(["optimizer_step"] if several else []))
    if not several:  # each of whose gradients is of other completions
        assert_same_metrics(ours, alone)


def test_the_mismatch_is_measured_over_both(launched: tuple[Path, list[dict[str, Any]]]) -> None:
    """And is then among the metrics that equal those of one process."""
    lines = gradtrace.open_run(launched[0] / "default" / "run").metrics()[0]
    assert lines[1]["mismatch/share_of_update"] > 0.01


def test_a_group_lay_on_both_processes_and_has_scores(launched: tuple[Path, list[dict[str, Any]]]) -> None:
    step = gradtrace.open_run(launched[0] / "default" / "run").step("influence_trace", 1)
    assert launched[1][0]["kind"] == "DistributedDataParallel"
    assert step.n_responses == 12 and set(step["group"]) == {0, 1, 2}
    assert np.isfinite(step["influence"]).all() and np.abs(step["influence"]).max() > 0


def test_tracing_changes_nothing_on_either_process(launched: tuple[Path, list[dict[str, Any]]]) -> None:
    for left in launched[1]:
        (plain, state, norms), (traced, traced_state, traced_norms) = (left["bits"][k] for k in ("False", "True"))
        assert all(torch.equal(traced[name], value) for name, value in plain.items())
        assert torch.equal(state, traced_state) and norms == traced_norms
    first, second = (left["bits"]["True"][0] for left in launched[1])
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_resumed_run_has_the_files_of_a_straight_one(launched: tuple[Path, list[dict[str, Any]]]) -> None:
    ours, straight = (gradtrace.open_run(launched[0] / name / "run") for name in ("resumed", "default"))
    assert_same_files(ours, straight, KINDS["default"], [1, 2])
    assert [line["step"] for line in ours.metrics()[0]] == [1, 2]


def test_what_fails_on_one_process_costs_the_rollout_on_both(
    launched: tuple[Path, list[dict[str, Any]]],
) -> None:
    assert [left["errors"] for left in launched[1]] == [1, 1]
    found = gradtrace.open_run(launched[0] / "failing" / "run")
    assert list(found.steps("influence_trace")) == [2]
    assert found.metrics()[0][-1]["influence_trace/debug_untraced_rollouts"] == 1


def test_fsdp2_writes_what_one_process_writes_and_changes_no_more_than_rounding(
    launched: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """One sharded direction. Scores are differences of float32 passes, to three digits and more."""
    run("not_measured", tmp_path, processes=1, dtype=torch.float32)
    ours, alone = (gradtrace.open_run(path) for path in (launched[0] / "sharded/run", tmp_path / "not_measured/run"))
    assert_same_files(ours, alone, {"influence_trace", "entropy_trace"}, [1, 2], tolerance=1e-3)
    for left in launched[1]:
        plain, traced = (left["sharded"]["weights"][key] for key in ("False", "True"))
        for name, value in plain.items():
            torch.testing.assert_close(traced[name], value, rtol=1e-5, atol=1e-6)
        selection, coarse = left["sharded"]["refusals"]
        assert "leave `selection` out" in selection and "credit='position'" in coarse
    assert "no blame trace" in (launched[0] / "sharded/run/run.log").read_text()


def test_refusals_are_said_on_both_processes(launched: tuple[Path, list[dict[str, Any]]]) -> None:
    for left in launched[1]:
        holds_a_run, checks = left["refusals"]
        assert "holds a run already" in holds_a_run
        assert "run `gradtrace verify` on a checkpoint" in checks
