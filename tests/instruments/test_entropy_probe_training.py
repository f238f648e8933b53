"""The entropy probe inside the training loop: it tells the truth about the step, and the step never notices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gradtrace import open_run
from gradtrace.cli import main
from gradtrace.errors import GradtraceError
from gradtrace.instruments.entropy_probe import ProbeBatch
from gradtrace.instruments.entropy_probe.reporter import ProbeReporter
from gradtrace.trace.run_files import RunFiles
from gradtrace.trace.step import Step
from gradtrace.training.host import open_instruments
from gradtrace.training.run import train
from tests.training import small

PROBE = (
    "trainer.entropy_probe.every=1",
    "trainer.entropy_probe.prompts=16",
    "trainer.entropy_probe.on_error=raise",
)
SHORT = ("trainer.total_steps=3", "trainer.validation.every=0", "actor.optim.weight_decay=0.1")


def run(folder: Path, *more: str) -> Path:
    return train(small.config(folder, *SHORT, *more)).run_dir


def checkpoint(run_dir: Path) -> dict[str, torch.Tensor]:
    folder = run_dir / "checkpoints" / "step_000003"
    names = ("policy/model.safetensors", "optimizer.safetensors", "rng.safetensors")
    return {f"{name}:{key}": value for name in names for key, value in load_file(folder / name).items()}


@pytest.mark.parametrize(
    "extra",
    [
        (),
        ("actor.epochs=2", "trainer.influence_trace.enable=true", "actor.packing=always"),
        ("algorithm.policy_loss=archer", "rollout.top_p=0.9", "actor.share_prompts=always"),
    ],
)
def test_weights_optimizer_and_random_numbers_are_bit_identical_with_the_probe_on(
    tmp_path: Path, extra: tuple[str, ...]
) -> None:
    off, on = checkpoint(run(tmp_path, *extra)), checkpoint(run(tmp_path, *extra, *PROBE))
    assert set(off) == set(on)
    assert all(torch.equal(off[name], on[name]) for name in off)


def steps(run_dir: Path) -> list[Step]:
    found = open_run(run_dir)
    return [found.step("entropy_probe", number) for number in found.steps("entropy_probe")]


@pytest.mark.parametrize(
    "extra",
    [("actor.optim.grad_clip=0.01",), ("actor.packing=always", "algorithm.aggregation=sequence_mean")],
)
def test_prediction_meets_measurement_and_shares_sum_to_it(tmp_path: Path, extra: tuple[str, ...]) -> None:
    run_dir = run(tmp_path, "actor.optim.lr=2e-4", *PROBE, *extra)
    records = [record for record in small.metrics(run_dir, timings=True) if record["step"] > 0]
    probed = steps(run_dir)
    assert len(probed) == len(records) == 3
    for record, step in zip(records, probed, strict=True):
        predicted = record["entropy_probe/delta_h_predicted"]
        measured = record["entropy_probe/delta_h_measured"]
        assert abs(predicted) > 3e-7
        assert abs(predicted - measured) < 0.1 * abs(measured) + 1e-7  # rounding of float32
        assert 15.9 < record["entropy_probe/ess"] <= 16.0001
        assert record["entropy_probe/stderr_difference"] < record["entropy_probe/stderr"]
        assert record["timing_s/entropy_probe"] > 0

        batch, share, meta = step["batch"], step["share"], step.meta
        of_u = batch == int(ProbeBatch.UPDATE)
        assert of_u.sum() == 2 * 3 and (~of_u).sum() == 16  # the first mini-batch
        parts = share[of_u].sum() + meta["momentum_share"] + meta["decay_share"]
        assert np.isclose(parts, predicted, rtol=1e-3)
        assert (meta["momentum_share"] == 0) == (step.step == 1)
        tokens = np.split(step["token_share"], step["token_offsets"][1:-1])
        np.testing.assert_allclose([t.sum() for t in tokens], share, rtol=1e-4, atol=1e-9)
        in_e = np.repeat(~of_u, step["length"])
        assert (step["entropy_change"][~in_e] == 0).all()
        np.testing.assert_allclose(
            step["entropy_change"][in_e], step["entropy_change_measured"][in_e], rtol=0.2, atol=1e-5
        )


def test_probes_are_made_every_so_many_steps_and_dropped_by_a_resumed_run(tmp_path: Path) -> None:
    run_dir = run(tmp_path, "trainer.entropy_probe.every=2", "trainer.entropy_probe.prompts=4")
    assert open_run(run_dir).steps("entropy_probe") == [2]
    again = train(small.config(tmp_path, f"resume={run_dir}", "trainer.total_steps=5"))
    assert open_run(again.run_dir).steps("entropy_probe") == [2, 4]


def test_failing_probe_costs_its_step_and_not_the_run(tmp_path: Path) -> None:
    parts = small.components(tmp_path, *SHORT, "trainer.entropy_probe.every=1")
    files = RunFiles(tmp_path / "run")
    said: list[str] = []
    steps = open_instruments(parts, files, said.append)
    probe = steps.reporters["entropy_probe"]
    assert isinstance(probe, ProbeReporter)
    probe.prompts = probe.prompts[:1]
    assert small.Trainer(parts, files, small.SilentDisplay(), steps).fit() == 3
    assert len(said) == 3 and "nothing is left to evaluate on" in said[0]
    assert "step 1 is not traced: all held-out prompts are in the rollout" in said[0]
    assert small.metrics(tmp_path / "run")[-1]["entropy_probe/errors"] == 3


def test_dropout_in_adapters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GradtraceError, match=r"model.lora.dropout=0"):
        run(tmp_path, *PROBE, "model.lora.rank=2", "model.lora.dropout=0.1")


def test_fewer_held_out_prompts_than_asked_for_are_said(tmp_path: Path) -> None:
    """Chains of one operation: 9 prompts where 128 were asked for, in training and in the command."""
    every = ("trainer.entropy_probe.every=3", "trainer.entropy_probe.prompts=128")
    run_dir = run(tmp_path, *every, "task.arithmetic.operations=1")
    said = "prompts=128: the task offers 9 held-out prompts, and all of these are used"
    assert f"trainer.entropy_probe.{said}" in (run_dir / "run.log").read_text()
    words = [str(run_dir), "update_prompts=2", "eta=[0.1]", "fresh=false"]
    words.append(f"reward.path={tmp_path / 'reward.py'}:count_ones")
    assert main(["probe", *words, "--output", str(tmp_path / "probe")]) == 0
    assert f"evaluation_{said}" in (tmp_path / "probe" / "run.log").read_text()
