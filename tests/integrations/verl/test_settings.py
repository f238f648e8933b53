"""Which settings instruments get: defaults that a job does not allow are left out, wishes are errors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradtrace.config.loader import load_config
from gradtrace.errors import GradtraceError
from gradtrace.instruments.contract import StepSize
from gradtrace.instruments.influence import RECORD, InfluenceTraceConfig
from gradtrace.instruments.influence.reporter import InfluenceReporter
from gradtrace.instruments.record import Record
from gradtrace.instruments.registry import instruments
from gradtrace.instruments.steps import check_needs
from gradtrace.integrations.verl.launch.job import held_out_prompts, write_unreported
from gradtrace.integrations.verl.settings import VerlSettings, sections_for
from gradtrace.trace.columns import GroupStatus
from tests.integrations.verl import harness


def test_a_default_that_the_job_does_not_allow_is_left_out_and_a_wish_is_an_error() -> None:
    cannot = {"policy_terms": "loss_mode=x is not known"}
    assert hasattr(sections_for(VerlSettings(), {}), "mismatch_every")
    assert not hasattr(sections_for(VerlSettings(), cannot), "mismatch_every")
    wish = sections_for(VerlSettings(mismatch_every=3), cannot)
    with pytest.raises(GradtraceError, match=r"gradtrace\.mismatch_every: loss_mode=x is not known"):
        check_needs(instruments()["mismatch"], wish.mismatch_every, cannot, "gradtrace.mismatch_every")


def test_groups_that_a_batch_tears_apart_have_no_scores_and_the_user_hears_of_it() -> None:
    said: list[str] = []
    run: Any = SimpleNamespace(step_size=None, split_groups=[1])
    config = InfluenceTraceConfig(enable=True, credit="position")
    reporter = InfluenceReporter(Record(RECORD, config, report=said.append), run)
    _, plan = reporter.plan(harness.rollout(), 1)
    assert plan is not None
    expected = [int(GroupStatus.SCORED)] * 4
    expected[1] = int(GroupStatus.NOT_CAPTURED)
    assert plan.status.tolist() == expected and not bool(plan.to_score[torch.tensor([4, 5, 6, 7])].any())
    assert len(said) == 1 and "1 groups of step 1 have no scores" in said[0]


def test_groups_that_a_batch_tears_apart_have_default_scores_and_are_not_measured() -> None:
    said: list[str] = []
    run: Any = SimpleNamespace(step_size=StepSize(4, 2, 4, 8), split_groups=[1])
    config = InfluenceTraceConfig(enable=True, measure="all", accepted_rejected_scope="per_prompt")
    reporter = InfluenceReporter(Record(RECORD, config, report=said.append), run)
    _, plan = reporter.plan(harness.rollout(), 1)
    assert plan is not None and bool(plan.to_score.all())
    assert plan.measured.tolist() == plan.own.tolist() == [0, 2, 3]
    assert said == [], "no scores are compared, within a mini-batch or otherwise"


def test_the_launcher_counts_held_out_prompts_and_says_when_none_are_left(tmp_path: Path) -> None:
    words = ["engine=verl", "trainer.validation.prompts=8", "trainer.entropy_probe.every=5"]
    assert held_out_prompts(load_config([*words, "trainer.entropy_probe.prompts=20"])) == 20
    assert held_out_prompts(load_config([*words, "trainer.entropy_probe.prompts=4"])) == 8
    task: Any = SimpleNamespace(validation_prompts=lambda count: [None] * min(count, 8))
    with pytest.raises(GradtraceError, match=r"trainer\.tracin needs validation prompts, and none are left"):
        write_unreported(load_config([*words, "trainer.tracin.enable=true"]), tmp_path, task)
