"""Findings: a planted fault is found and its culprit named; a quiet run is left in peace; every place is told."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gradtrace import open_run
from gradtrace.batch import RolloutBatch
from gradtrace.commands.doctor.health import examine
from gradtrace.instruments.blame.reporter import StepBlame
from gradtrace.instruments.findings import FindingsConfig
from gradtrace.instruments.findings.text import (
    batch_statistics,
    ends_like_a_middle,
    repeated_share,
    reward_length_correlation,
)
from gradtrace.instruments.findings.watch import DETECTORS, Findings
from gradtrace.viewer.group import group_payload
from gradtrace.viewer.scores import load_step
from gradtrace.viewer.vocabulary import load_vocabulary
from tests.instruments.test_traces import run
from tests.training import small

QUIET = {
    "actor/grad_norm": 1.0,
    "blame/largest_grad_norm": 1.5,
    "actor/entropy": 0.5,
    "actor/kl_loss": 0.01,
    "actor/pg_clipfrac": 0.01,
    "response_length/mean": 4.0,
    "response_length/clip_ratio": 0.0,
    "critic/rewards/mean": 0.4,
    "critic/vf_loss": 0.1,
    "val-core/x/reward/mean@4": 0.4,
    "influence_trace/predicted_over_measured": 1.05,
    "influence_trace/accepted_less_likely": 0.25,
}
END = 1


def batch(seed: int = 0, **columns: Any) -> RolloutBatch:
    """12 responses to 4 prompts, of different digits, each with an end token; mixed rewards."""
    generator = torch.Generator().manual_seed(seed)
    responses = torch.randint(5, 17, (12, 6), generator=generator)
    lengths = torch.arange(12) % 3 + 4
    mask = torch.arange(6) < lengths[:, None]
    responses[torch.arange(12), lengths - 1] = END
    log_probs = torch.full((12, 6), -0.5)
    made = RolloutBatch(
        prompts=[[3, 4, 5 + group] for group in range(4)],
        group=torch.arange(4).repeat_interleave(3),
        responses=responses * mask,
        response_mask=mask,
        finished=torch.ones(12, dtype=torch.bool),
        sampler_log_probs=log_probs,
        rewards=torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0]),
        advantages=torch.ones(12, 6),
        old_log_probs=log_probs + 1e-6,
        entropies=torch.full((12, 6), 0.5),
    )
    return made.replace(**columns)


def watched(folder: Path, said: list[str] | None = None, blame: StepBlame | None = None, **knobs: Any) -> Findings:
    lines = [] if said is None else said
    findings = Findings(
        FindingsConfig(**knobs), folder, lambda ids: " ".join(map(str, ids)), lines.append, lambda: blame
    )
    findings.start(0)
    return findings


def quiet_steps(findings: Findings, steps: int = 6) -> None:
    for step in range(1, steps + 1):
        findings.see(step, batch(step), QUIET)


def blame_of(row: int, place: int) -> StepBlame:
    """One optimizer step whose gradient is mostly one token's."""
    blame = StepBlame.of(batch())
    blame.optimizer_step[:] = 0
    blame.share[row, place] = 0.9
    blame.updates = [{"number": 0, "grad_norm": 50.0, "residual": 0.0}]
    blame.sketch = {r: torch.randn(64, generator=torch.Generator().manual_seed(r)) for r in range(12)}
    return blame


FAULTS: dict[str, tuple[dict[str, float], dict[str, Any]]] = {
    "gradient_spike": ({"actor/grad_norm": 50.0, "blame/largest_grad_norm": 50.0}, {}),
    "entropy": ({"actor/entropy": 5.0}, {}),
    "length_drift": ({"response_length/mean": 9.0}, {}),
    "kl_runaway": ({"actor/kl_loss": 3.0}, {}),
    "clip_saturation": ({"actor/pg_clipfrac": 0.6}, {}),
    "validation_falls": ({"val-core/x/reward/mean@4": 0.1, "critic/rewards/mean": 0.45}, {}),
    "reward_jump": ({"critic/rewards/mean": 0.9}, {}),
    "critic_diverges": ({"critic/vf_loss": 40.0}, {}),
    "influence_gap": ({"influence_trace/predicted_over_measured": 3.0}, {}),
    "likelihood_displacement": ({"influence_trace/accepted_less_likely": 0.75}, {}),
    "repetition": ({"response_length/clip_ratio": 0.9}, {"finished": torch.zeros(12, dtype=torch.bool)}),
    "mismatch": ({}, {"old_log_probs": torch.full((12, 6), -2.0)}),
    "dominating_prompt": ({}, {"prompts": [[3, 4, 5]] * 4}),
    "constant_groups": ({}, {"rewards": torch.ones(12)}),
    "end_token": ({}, {"responses": torch.full((12, 6), 7)}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_by_its_detector_and_told_once(name: str, tmp_path: Path) -> None:
    said: list[str] = []
    findings = watched(tmp_path, said)
    quiet_steps(findings)
    assert said == []
    metrics, columns = FAULTS[name]
    for step in range(7, 11):
        own = findings.see(step, batch(step, **columns), {**QUIET, **metrics})
    told = [json.loads(line) for line in (tmp_path / "findings.jsonl").read_text().splitlines()]
    mine = [finding for finding in told if finding["detector"] == name]
    assert len(mine) == 1 and mine[0]["sentence"] and 0.5 <= mine[0]["confidence"] <= 1
    assert mine[0]["link"].startswith("#/") and any(name in line for line in said)
    sudden = ("gradient_spike", "critic_diverges", "validation_falls", "reward_jump")
    assert own[f"findings/{name}"] == 1.0 or name in sudden
    assert own["findings/total"] == len(told)


@pytest.mark.parametrize(
    ("metric", "values", "is_found"),
    [
        ("predicted_over_measured", [3.0, 0.1, 3.0, 0.1], False),
        ("predicted_over_measured", [3.0, 3.0, 1.2, 3.0], False),
        ("predicted_over_measured", [0.2, -0.5, 0.1], True),
        ("accepted_less_likely", [0.75, 0.5, 0.75, 1.0], False),
        ("accepted_less_likely", [0.6, 0.8, 0.6], True),
    ],
)
def test_only_what_measured_groups_say_three_times_running_is_found(
    metric: str, values: list[float], is_found: bool, tmp_path: Path
) -> None:
    findings, name = watched(tmp_path), f"influence_trace/{metric}"
    quiet_steps(findings)
    for step, value in enumerate(values, 7):
        findings.see(step, batch(step), {**QUIET, name: value})
        unmeasured = {key: each for key, each in QUIET.items() if key != name}
        findings.see(step, batch(step), unmeasured)  # steps without a measured group are no evidence of either
    told = {finding["detector"] for finding in open_run(tmp_path).findings()}
    assert bool(told & {"influence_gap", "likelihood_displacement"}) == is_found


@pytest.mark.parametrize(("means", "jumps"), [([0.9] * 4, True), ([1.0, 1.0, 1.0, 0.0], False)])
def test_a_jump_of_the_reward_must_exceed_what_drawing_prompts_does(
    means: list[float], jumps: bool, tmp_path: Path
) -> None:
    """The same change of the mean: with prompts of very different means, four of them say little."""
    findings = watched(tmp_path)
    quiet_steps(findings)
    rewards = torch.tensor(means).repeat_interleave(3)
    findings.see(7, batch(7, rewards=rewards), {**QUIET, "critic/rewards/mean": 0.9})
    assert any(f["detector"] == "reward_jump" for f in open_run(tmp_path).findings()) == jumps


def test_few_prompts_of_one_kind_are_no_jump_of_the_reward(tmp_path: Path) -> None:
    """Four prompts that the policy never gets right say nothing of their own spread; the steps before do."""
    findings = watched(tmp_path)
    for step in range(1, 8):
        rewards = torch.tensor([0.2 + 0.6 * (step % 2), 0.0, 1.0, 0.5]).repeat_interleave(3)
        findings.see(step, batch(step, rewards=rewards), {**QUIET, "critic/rewards/mean": float(rewards.mean())})
    findings.see(8, batch(8, rewards=torch.zeros(12)), {**QUIET, "critic/rewards/mean": 0.0})
    assert not any(f["detector"] == "reward_jump" for f in open_run(tmp_path).findings())


PLUNGE, SLOW_FALL = [0.5] * 5 + [0.4, 0.12, 0.1], [0.5, 0.42, 0.35, 0.3, 0.25, 0.2, 0.16, 0.13]


@pytest.mark.parametrize(
    ("entropies", "knobs", "tells"),
    [(PLUNGE, {}, True), (PLUNGE, {"entropy_plunge": 0.0}, False), (SLOW_FALL, {}, False)],
)
def test_a_reward_that_rises_excuses_a_slow_fall_of_entropy_alone(
    entropies: list[float], knobs: dict[str, float], tells: bool, tmp_path: Path
) -> None:
    findings = watched(tmp_path, **knobs)
    for step, entropy in enumerate(entropies, 1):
        metrics = {**QUIET, "actor/entropy": entropy, "critic/rewards/mean": 0.3 + 0.05 * step}
        findings.see(step, batch(step), metrics)
    told = [f["sentence"] for f in open_run(tmp_path).findings() if f["detector"] == "entropy"]
    assert len(told) == tells and all("learning rate" in sentence for sentence in told)


def test_a_spike_names_the_token_that_made_it(tmp_path: Path) -> None:
    findings = watched(tmp_path, blame=blame_of(row=5, place=2))
    quiet_steps(findings)
    findings.see(7, batch(7), {**QUIET, "blame/largest_grad_norm": 50.0})
    (finding,) = [f for f in open_run(tmp_path).findings() if f["detector"] == "gradient_spike"]
    first = finding["culprits"][0]
    assert (first["row"], first["position"], first["group"]) == (5, 2, 1)


def test_a_gradient_that_is_not_finite_names_whose_it_is(tmp_path: Path) -> None:
    blame = StepBlame.of(batch())
    blame.optimizer_step[:] = 0
    blame.norm[:], blame.norm[4], blame.skipped = 1.0, torch.inf, [0]
    findings = watched(tmp_path, blame=blame)
    findings.see(1, batch(), {**QUIET, "actor/skipped_updates": 1.0})
    (finding,) = open_run(tmp_path).findings()
    assert finding["detector"] == "gradient_spike" and finding["culprits"][0]["row"] == 4


def test_like_gradients_across_prompts_that_grow_are_hacking_and_their_token_is_named(tmp_path: Path) -> None:
    blame = blame_of(row=0, place=0)
    findings = watched(tmp_path, blame=blame)
    hacked = [1, 5, 6, 10]  # accepted responses to four prompts
    for step in range(1, 20):
        generator = torch.Generator().manual_seed(step)
        blame.sketch = {r: torch.randn(64, generator=generator) for r in range(12)}
        if step <= 12:
            findings.see(step, batch(step), QUIET)
            continue
        for row in hacked:
            blame.sketch[row] = 1.0 + 0.3 * blame.sketch[row]
            blame.share[row] = 0.0
            blame.share[row, 2] = 0.2
        spoilt = batch(step)
        spoilt.responses[hacked, 2] = 9
        findings.see(step, spoilt, QUIET)
    (finding,) = [f for f in open_run(tmp_path).findings() if f["detector"] == "reward_hacking"]
    assert any(culprit["text"].split()[-1] == "9" for culprit in finding["culprits"][:3])


def test_a_shift_by_one_is_called_by_its_name(tmp_path: Path) -> None:
    findings = watched(tmp_path)
    generator = torch.Generator().manual_seed(0)
    sampled = -3 * torch.rand((12, 6), generator=generator)
    findings.see(1, batch(sampler_log_probs=sampled, old_log_probs=torch.roll(sampled, -1, 1)), QUIET)
    assert "off by one" in open_run(tmp_path).findings()[0]["sentence"]


def test_a_detector_can_be_turned_off_and_thresholds_are_knobs(tmp_path: Path) -> None:
    for knobs in ({"off": ["gradient_spike"]}, {"spike_ratio": 100.0}, {"enable": False}):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        findings = watched(folder, **knobs)
        quiet_steps(findings)
        findings.see(7, batch(7), {**QUIET, "blame/largest_grad_norm": 50.0})
        assert open_run(folder).findings() == []


def test_a_detector_that_fails_is_said_once_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(moment: object) -> None:
        raise ValueError("no such thing")

    monkeypatch.setitem(DETECTORS, "entropy", broken)
    said: list[str] = []
    findings = watched(tmp_path, said)
    quiet_steps(findings)
    findings.see(7, batch(7), {**QUIET, "blame/largest_grad_norm": 50.0})
    assert len([line for line in said if "entropy failed" in line]) == 1
    assert any("gradient_spike" in line for line in said)


# ---------------------------------------------------------------- numbers of a batch


def test_statistics_of_a_batch() -> None:
    loops = batch(responses=torch.tensor([[8, 9, 8, 9, 8, 9]]).repeat(12, 1) * batch().response_mask)
    assert float(repeated_share(loops)[0]) == 0.0  # four tokens are no loop of two
    same = batch(responses=torch.full((12, 6), 8) * batch().response_mask)
    assert float(repeated_share(same)[2]) == pytest.approx(3 / 6)
    assert ends_like_a_middle(batch()) == 0.0 and ends_like_a_middle(same) == 1.0
    longer_pays = batch(rewards=batch().response_lengths.float())
    assert reward_length_correlation(longer_pays) == pytest.approx(1.0)
    assert batch_statistics(batch(), None)["batch/constant_groups"] == 0.0


# ---------------------------------------------------------------- in a run


def test_a_run_tells_its_findings_everywhere_and_a_resumed_one_goes_on_alike(tmp_path: Path) -> None:
    """An absurd threshold makes a finding certain."""
    knobs = ("trainer.findings.constant_groups=0.0", "trainer.findings.warmup_steps=2")
    folder = run(tmp_path, "trainer.total_steps=4", *knobs)
    told = open_run(folder).findings()
    assert "constant_groups" in {finding["detector"] for finding in told}
    assert "constant_groups" in (folder / "run.log").read_text()
    assert small.metrics(folder)[-1]["findings/constant_groups"] == 1.0
    assert any("constant_groups" in finding.what for finding in examine(open_run(folder)))

    findings = Findings(FindingsConfig(constant_groups=0.0), folder, str)
    findings.start(3)
    assert [f["step"] for f in open_run(folder).findings()] == [f["step"] for f in told if f["step"] <= 3]
    assert len(findings.history) == 4  # the validation before the first step, and three steps


def test_a_part_of_the_reward_that_rises_at_the_cost_of_another_is_found(tmp_path: Path) -> None:
    findings = watched(tmp_path)
    for step in range(1, 16):
        parts = {"reward_part/format": 0.05 * step, "reward_part/right": 0.6 - 0.03 * step}
        findings.see(step, batch(step), {**QUIET, **parts})
    (finding,) = [f for f in open_run(tmp_path).findings() if f["detector"] == "reward_parts"]
    assert "reward_part/format rose" in finding["sentence"]


def test_parts_of_rewards_stand_in_the_metrics_in_the_trace_and_beside_their_responses(
    tmp_path: Path,
) -> None:
    folder = run(
        tmp_path,
        "trainer.total_steps=1",
        "trainer.entropy_trace.enable=true",
        "reward.extra={think_format: 0.1}",
    )
    metrics = small.metrics(folder)[-1]
    view = load_step(open_run(folder), 1)
    assert view is not None
    of_responses = [view.first.reward_parts(r) for r in range(view.n_responses)]
    for r, parts in enumerate(of_responses):
        task = next(value for name, value in parts.items() if name != "think_format")
        assert view.value("reward", r) == pytest.approx(task + 0.1 * parts["think_format"])
    for name in of_responses[0]:
        mean = sum(parts[name] for parts in of_responses) / len(of_responses)
        assert metrics[f"reward_part/{name}"] == pytest.approx(mean)
    shown = group_payload(view, 0, load_vocabulary(open_run(folder)))
    assert shown["responses"][0]["reward_parts"] == of_responses[0]


def test_every_detector_stands_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "findings.md").read_text()
    assert [name for name in DETECTORS if f"`{name}`" not in page] == []
    knobs = {field.name for field in dataclasses.fields(FindingsConfig)}
    assert {"spike_ratio", "hacking_likeness"} <= knobs
