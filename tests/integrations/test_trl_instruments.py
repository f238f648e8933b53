"""Instruments of installed packages in a GRPOTrainer, and further settings of ours: `attach(…, instruments=…)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradtrace
from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.instruments import registry
from gradtrace.instruments.contract import Instrument, Reporter, Table
from gradtrace.instruments.settings import TraceConfig
from gradtrace.integrations.trl import attach
from tests.instruments import sway
from tests.integrations.trl_reference import POSITION
from tests.integrations.trl_runs import grpo_trainer


def test_an_installed_instrument_finds_what_blame_finds(tmp_path: Path) -> None:
    with sway.installed():
        trainer = grpo_trainer(tmp_path, max_steps=4)
        attach(trainer, tmp_path / "run", blame_every=1, on_error="raise", instruments={"sway": {"write_every": 2}})
        trainer.train()
        run = gradtrace.open_run(tmp_path / "run")
        assert run.verify() == [] and list(run.steps("sway")) == [2, 4]
        for number in (2, 4):
            found, expected = run.step("sway", number), run.step("blame", number)
            np.testing.assert_array_equal(found["row"], expected["row"])
            np.testing.assert_array_equal(found["sway"], expected["push"])
        assert run.metrics()[0][1]["sway/largest"] == pytest.approx(np.abs(run.step("sway", 2)["sway"]).max())
        assert run.config["trainer"]["sway"]["write_every"] == 2


@pytest.mark.parametrize(("slices", "known"), [(2, False), (4, True)], ids=["one_step", "several_steps"])
def test_reporters_are_told_no_zeros_for_what_is_not_known_yet(slices: int, known: bool, tmp_path: Path) -> None:
    """Where slices span several optimizer steps, TRL takes log-probs when it generates; else its first pass does."""
    planned: list[RolloutBatch] = []
    written: list[RolloutBatch] = []

    class Watching(Reporter):
        def plan(self, batch: RolloutBatch, step: int, sampled: RolloutBatch | None) -> tuple[RolloutBatch, None]:
            planned.append(batch)
            return batch, None

        def write(self, batch: RolloutBatch, step: int, table: Table | None) -> dict[str, float]:
            assert table is None
            written.append(batch)
            return {}

    registry.register(Instrument(TraceConfig, lambda record, run: Watching(), name="watching"))
    try:
        trainer = grpo_trainer(tmp_path, max_steps=slices // 2, steps_per_generation=slices)
        attach(trainer, tmp_path / "run", influence=POSITION, on_error="raise", instruments={"watching": {}})
        trainer.train()
    finally:
        registry.forget("watching")
    for name in ("old_log_probs", "entropies"):
        assert (getattr(planned[0], name) is not None) == known
        values = written[0].need(name)
        assert bool((values[written[0].response_mask] != 0).all())
        assert not known or torch.equal(values, planned[0].need(name))


def test_settings_of_ours_go_on_top_of_the_keywords(tmp_path: Path) -> None:
    trainer = grpo_trainer(tmp_path, max_steps=1)
    attach(trainer, tmp_path / "run", blame_every=7, on_error="raise", instruments={"blame": {"write_every": 1}})
    trainer.train()
    assert list(gradtrace.open_run(tmp_path / "run").steps("blame")) == [1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sway": {}}, r"no instrument 'sway'\. Known: .*blame"),
        ({"blame": {"every": 2}}, "blame has no setting every. Known: .*write_every"),
        ({"blame": {"write_every": 0}}, r"instruments\.blame\.write_every=0 is too small: at least 1"),
    ],
    ids=["no_such_instrument", "no_such_setting", "out_of_bounds"],
)
def test_what_is_not_known_is_refused_when_it_is_attached(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(GradtraceError, match=message):
        attach(grpo_trainer(tmp_path), tmp_path / "run", instruments=given)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (
            {"blame": {}, "influence_trace": {"credit": "position"}},
            {"steps_per_generation": 4},
            "blame: a rollout is dealt out over 4 slices",
        ),
        ({"blame": {}}, {"steps_per_generation": 4}, "influence trace: a rollout is dealt out over 4 slices"),
        ({"mismatch": 1}, {"loss_type": "cispo"}, "mismatch_every: loss_type='cispo' does not clip"),
        ({"entropy_probe": {"every": 1}}, {}, "entropy_probe: TRL samples by itself"),
        ({"influence": None}, {}, "no instrument 'influence'"),
        (
            {"influence_trace": {"scope_pass": True, "credit": "position"}},
            {},
            "scope_pass=true: this host cannot run the whole batch",
        ),
    ],
    ids=["blame", "influence", "mismatch", "probe", "keyword", "scope_pass"],
)
def test_what_was_asked_for_and_cannot_run_is_an_error_with_the_reason(
    given: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    trainer = grpo_trainer(tmp_path, max_steps=1, **options)
    with pytest.raises(GradtraceError, match=message):
        attach(trainer, tmp_path / "run", instruments=given)
        trainer.train()
    assert not (tmp_path / "run").exists()
