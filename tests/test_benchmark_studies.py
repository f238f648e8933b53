"""What makes studies cheaper leaves their numbers as they are."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import findings
from benchmarks._findings_smollm2 import SMOLLM2_FAULTS
from benchmarks._validity_page import table
from benchmarks.deletion import LIKE, RULES
from benchmarks.early_steps import READINGS
from benchmarks.early_steps import main as early_steps
from benchmarks.growth import growth
from benchmarks.probe_accuracy import coverage
from benchmarks.validity import main as validity


def test_faulty_runs_share_steps_only_where_these_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings.smollm2, "settings", lambda: ("recipe=smollm2_countdown",))  # needs no model here
    plan = [(kind, 3) for kind in (*findings.FAULTS, *SMOLLM2_FAULTS)] + [(findings.CLEAN, 3), ("flipped rewards", 4)]
    found = findings.together(plan)
    assert sorted((kind, seed) for kinds, seed in found for kind in kinds) == sorted(plan)
    for kinds, seed in found:
        first = {findings.ALL_FAULTS[kind].first_step for kind in kinds}
        assert len(first) == 1 and (first != {1} or len(kinds) == 1), kinds
        assert len({tuple(findings.settings_of(kind, seed)) for kind in kinds}) == 1, kinds
    alone = [kinds[0] for kinds, _ in found if len(kinds) == 1]
    assert sorted(alone) == ["clean", "critic diverges", "flipped rewards", "loophole"]


def test_every_control_of_the_deletion_study_comes_after_the_run_whose_share_it_keeps() -> None:
    order = list(RULES)
    assert all(order.index(like) < order.index(rule) for rule, like in LIKE.items())


def test_growth_in_proportion_has_a_range_of_nothing() -> None:
    found = growth([1.0, 2.0, 4.0], [3.0, 6.0, 12.0])
    assert abs(found.mean - 1) < 1e-9 and abs(found.low - 1) < 1e-9 and abs(found.high - 1) < 1e-9
    bent = growth([1.0, 2.0, 4.0], [3.0, 6.0, 24.0])
    assert abs(bent.low - 1) < 1e-9 and abs(bent.high - 2) < 1e-9 and bent.low < bent.mean < bent.high


def test_pairs_that_share_batches_do_not_narrow_the_interval_of_a_coverage() -> None:
    row = {"predicted": [(0.0, 1.0)] * 6, "real": [(0.0, 1.0)] * 6}
    found = coverage([row, row], "real", 1.0)
    assert found.mean == 1 and found.count == 6 and 0.5 < found.low < 0.7


def test_early_steps_have_both_readings(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        early_steps(["--quick"])
    finally:
        torch.set_num_threads(threads)
    ratios = json.loads(capsys.readouterr().out.splitlines()[-1])["ratios"]
    assert set(ratios) == {f"{name}_step_{step}" for name in READINGS for step in (1, 3)}
    assert all(-1 <= value <= 1 for value in ratios.values())
    assert ratios["done_to_it_step_1"] > 0.9  # what a sign-like step does to tokens is known
    assert ratios["training_on_it_step_3"] > ratios["baseline_step_3"]


def test_the_validity_study_prints_one_line_of_both_questions(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        validity(["--quick"])
    finally:
        torch.set_num_threads(threads)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    ratios, detail = found["ratios"], found["detail"]["demo"]
    assert ratios["demo_batch_spearman"] > max(0.7, ratios["demo_batch_baseline_spearman"])
    assert ratios["demo_own_spearman"] > ratios["demo_own_baseline_spearman"]
    assert 0.9 < ratios["demo_books_slope"] < 1.1 and detail["books"]["groups"] >= 2
    text = table("The demo", detail)
    assert text.count("\n| ") == len(detail["table"]["batch"]) + 1 and "| influence | " in text
