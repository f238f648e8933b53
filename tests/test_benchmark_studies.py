"""What makes studies cheaper leaves their numbers as they are."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import findings
from benchmarks._findings_smollm2 import SMOLLM2_FAULTS
from benchmarks._validity_states import SharedPrompts
from benchmarks.common import tiny_model
from benchmarks.deletion import LIKE, RULES
from benchmarks.early_steps import main as early_steps
from benchmarks.growth import growth
from benchmarks.probe_accuracy import coverage
from gradtrace.instruments.verify.trial import Trial


def test_a_prompt_computed_once_gives_the_same_contrasts() -> None:
    model = tiny_model().double()
    generator = torch.Generator().manual_seed(0)
    sequences, prompt_lengths = [], []
    for prompt_length in (5, 7):
        prompt = torch.randint(3, 18, (prompt_length,), generator=generator)
        for length in (3, 1, 6, 4):
            sequences.append(torch.cat([prompt, torch.randint(3, 18, (length,), generator=generator)]))
            prompt_lengths.append(prompt_length)
    trial = SharedPrompts(
        model,
        torch.optim.AdamW(model.parameters()),
        sequences,
        prompt_lengths,
        group=torch.arange(2).repeat_interleave(4),
        accepted=torch.tensor([True, False, False, True, False, True, False, False]),
        advantages=torch.ones(8),
        temperature=0.7,
    )
    with torch.no_grad():
        shared, whole = trial.contrasts([0, 1]), Trial.contrasts(trial, [0, 1])
    assert shared.dtype == torch.float64
    torch.testing.assert_close(shared, whole, rtol=1e-10, atol=1e-12)


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


def test_scores_of_early_steps_are_held_against_real_ones(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        early_steps(["--quick"])
    finally:
        torch.set_num_threads(threads)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found["ratios"]) == {"single_token_step_1", "single_token_step_2"}
    assert all(-1 <= value <= 1 for value in found["ratios"].values())
    assert found["ratios"]["single_token_step_2"] > 0.7  # four tokens of five groups: 1.0
    assert sum(found["detail"]["groups"].values()) >= 4
