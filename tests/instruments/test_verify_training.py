"""`trainer.influence_trace.verify_every`: scores are held against real steps while a run trains, unnoticed by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gradtrace import open_run
from gradtrace.commands.doctor.health import examine
from gradtrace.errors import GradtraceError
from gradtrace.instruments.contract import Rows
from gradtrace.instruments.verify.in_training import VALIDITY, VALIDITY_BASELINE, TrainingCheck
from gradtrace.training.run import train
from tests.instruments.test_traces import columns, influence, weights
from tests.training import small

KNOBS = (
    *influence("enable=true", "on_error=raise"),
    *("trainer.total_steps=3", "trainer.validation.every=0", "rollout.n=4", "actor.optim.lr=1e-3"),
)


def run(folder: Path, *more: str) -> Path:
    folder.mkdir()
    return train(small.config(folder, *KNOBS, *more)).run_dir


@pytest.mark.parametrize(
    "extra",
    [(), ("algorithm.kl_coef=0.1", "actor.epochs=2"), tuple(influence("accepted_rejected_scope=per_prompt"))],
    ids=["plain", "kl", "own-prompt"],
)
def test_training_and_trace_are_bit_identical_with_checks(tmp_path: Path, extra: tuple[str, ...]) -> None:
    checked = run(tmp_path / "a", *influence("verify_every=1"), *extra)
    plain = run(tmp_path / "b", *extra)
    first, second = weights(checked), weights(plain)
    assert all(torch.equal(first[name], second[name]) for name in second)
    for step in (1, 2, 3):
        own, other = columns(checked, step=step), columns(plain, step=step)
        assert all(np.array_equal(own[name], other[name]) for name in other)
    rows, without = small.metrics(checked), small.metrics(plain)
    assert all(VALIDITY in row and VALIDITY_BASELINE in row for row in rows)
    for row in rows:
        for name in (VALIDITY, VALIDITY_BASELINE):
            assert -1 <= row.pop(name) <= 1
    assert rows == without


def test_right_scores_are_valid_and_turned_ones_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(tmp_path / "a", *influence("verify_every=1"))
    right = [row[VALIDITY] for row in small.metrics(found)]
    assert min(right[1:]) > 0.5  # at the first step, like a sign, no score knows what a token's weight does
    checked = TrainingCheck.run

    def turned(self: TrainingCheck, rows: Rows, parts: Tensor, *more: Any) -> dict[str, float]:
        return checked(self, rows, -parts, *more)

    monkeypatch.setattr(TrainingCheck, "run", turned)
    wrong = run(tmp_path / "b", *influence("verify_every=1"))
    assert [row[VALIDITY] for row in small.metrics(wrong)] == pytest.approx([-v for v in right])
    (finding,) = (f.what for f in examine(open_run(wrong)) if "checks during training" in f.what)
    assert finding.startswith("Not trustworthy") and "scores of this run predict what" in finding


def test_doctor_says_what_checks_and_verify_found(tmp_path: Path) -> None:
    found = run(tmp_path / "a", *influence("verify_every=1"))
    report = found / "verify" / "step_000002" / "report.json"
    report.parent.mkdir(parents=True)
    report.write_text(json.dumps({"verdict": "scores of this run predict single-token steps with .88", "step": 2}))
    said = [finding.what for finding in examine(open_run(found))]
    assert any("(3 checks during training)" in what for what in said)
    assert "Scores of this run predict single-token steps with .88 (`gradtrace verify`, step 2)." in said
    report.write_text("{}")
    assert not any("gradtrace verify" in finding.what for finding in examine(open_run(found)))


def test_checks_come_every_so_many_steps_and_only_in_traced_ones(tmp_path: Path) -> None:
    rows = small.metrics(run(tmp_path / "a", *influence("verify_every=2")))
    assert [VALIDITY in row for row in rows] == [False, True, False]
    with pytest.raises(GradtraceError, match=r"verify_every=3: scores are made every 2 steps"):
        run(tmp_path / "b", *influence("verify_every=3", "write_every=2"))
    with pytest.raises(GradtraceError, match=r"verify_every=1 holds the default score against real optimizer steps"):
        run(tmp_path / "c", *influence("verify_every=1", "credit=position"))


def test_a_failing_check_is_told_and_costs_neither_step_nor_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr("gradtrace.instruments.verify.in_training.drawn", broken)
    found = run(tmp_path / "a", *influence("verify_every=1", "on_error=warn"))
    assert "step 1 is not verified: no memory" in (found / "run.log").read_text()
    assert len(open_run(found).steps("influence_trace")) == 3 and VALIDITY not in small.metrics(found)[0]
