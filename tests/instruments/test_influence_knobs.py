"""Knobs of the influence trace around its scores: who is accepted, what is counted, what cannot fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from gradtrace import open_run
from gradtrace.errors import GradtraceError
from gradtrace.training.components import build_components
from gradtrace.training.run import train
from tests.training import small

TRACED = ("trainer.influence_trace.enable=true", "trainer.total_steps=1", "trainer.validation.every=0")


def reward(folder: Path) -> str:
    """A reward with many values, so that a threshold and the maximum differ."""
    (folder / "length.py").write_text("def ones(response, item):\n    return response.count('1') / 8\n")
    return f"reward.path={folder / 'length.py'}:ones"


def test_a_threshold_decides_who_is_accepted(tmp_path: Path) -> None:
    threshold = "trainer.influence_trace.accepted_threshold=0.125"
    run = open_run(train(small.config(tmp_path, *TRACED, reward(tmp_path), threshold)).run_dir)
    step = run.step("influence_trace", 1)
    assert len(step["group"]) and (step["accepted"] == (step["reward"] >= 0.125)).all()
    for group in np.unique(step["group"]):
        assert len(set(step["accepted"][step["group"] == group])) == 2


def test_captures_are_counted(tmp_path: Path) -> None:
    position = "trainer.influence_trace.credit=position"
    run = open_run(train(small.config(tmp_path, *TRACED, reward(tmp_path), position)).run_dir)
    record = run.metrics()[0][-1]
    forward = record["influence_trace/debug_forward_captures"]
    assert forward >= record["influence_trace/debug_modules"] > 0
    assert record["influence_trace/debug_backward_captures"] == forward


def test_a_step_without_a_move_is_traced_and_moves_nothing(tmp_path: Path) -> None:
    config = small.config(tmp_path, *TRACED, reward(tmp_path), "trainer.skip_optimizer=true")
    run_dir = train(config).run_dir
    assert len(open_run(run_dir).step("influence_trace", 1)["group"])
    moved = small.config(tmp_path, *TRACED, reward(tmp_path))
    start = build_components(config).policy.model.state_dict()
    still, other = (load_file(folder / "policy" / "model.safetensors") for folder in (run_dir, train(moved).run_dir))
    assert all((start[name] == still[name]).all() for name in still)
    assert any((start[name] != other[name]).any() for name in other)


def test_what_cannot_fit_is_refused_before_it_is_allocated(tmp_path: Path) -> None:
    config = small.config(
        tmp_path,
        *(*TRACED, reward(tmp_path)),
        *("trainer.influence_trace.hessian_mode=inverse", "trainer.influence_trace.solver=dense"),
        "data.train_batch_size=4000000",
    )
    with pytest.raises(GradtraceError, match="MB are free"):
        train(config)


WIDE = (
    *TRACED,
    *("trainer.influence_trace.accepted_rejected_scope=all_selected", "trainer.influence_trace.credit=both"),
    "trainer.influence_trace.hessian_mode=identity",
)


def test_a_scope_pass_compares_the_whole_step_at_its_first_weights(tmp_path: Path) -> None:
    """Two mini-batches, scored in a pass of their own, have the scores of one mini-batch that holds all."""
    steps, weights = {}, {}
    for name, knobs in {
        "one": ("actor.mini_batch_size=0",),
        "pass": ("actor.mini_batch_size=2", "trainer.influence_trace.scope_pass=true"),
        "two": ("actor.mini_batch_size=2",),
    }.items():
        folder = train(small.config(tmp_path, *WIDE, reward(tmp_path), *knobs)).run_dir
        steps[name] = open_run(folder).step("influence_trace", 1)
        weights[name] = load_file(folder / "policy" / "model.safetensors")
        said = (folder / "run.log").read_text()
        assert ("compares the responses of one mini-batch (2 of the step's 4 prompts)" in said) == (name == "two")
    assert [steps[name].meta["mini_batches"] for name in steps] == [1, 1, 2]
    for column in ("influence_position", "influence_loss_term", "pairwise"):
        np.testing.assert_allclose(steps["pass"][column], steps["one"][column], rtol=1e-3, atol=1e-4)
    assert not steps["pass"]["optimizer_step"].any() and steps["two"]["optimizer_step"].any()
    assert len(steps["pass"]["pairwise_member"]) == len(steps["pass"]["group"]) ** 2
    assert all((weights["pass"][key] == weights["two"][key]).all() for key in weights["two"])
