"""TracIn selection in real runs: what is trained on, stored, said, and continued after a stop."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gradtrace import open_run
from gradtrace.errors import GradtraceError
from gradtrace.instruments.tracin import TracinReason
from gradtrace.instruments.tracin.diagnosis import diagnose_step
from gradtrace.instruments.tracin.validation import choose_groups, extreme_responses
from gradtrace.trace.columns import GroupStatus
from gradtrace.training.experience import flip_rewards
from gradtrace.training.run import train
from gradtrace.training.terminal import SilentDisplay
from tests.training import small
from tests.training.test_resume import files

ON = (
    "trainer.tracin.enable=true",
    "trainer.tracin.val_batch_size=4",
    "trainer.tracin.train_on_validation=false",
)
TRACED = ("trainer.entropy_trace.enable=true",)
EXTREME = ("trainer.tracin.val_level=response", "trainer.tracin.val_strategy=balanced")
CONSTANT = "def constant(response, item):\n    return 1.0\n"


class Listening(SilentDisplay):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def message(self, text: str) -> None:
        self.lines.append(text)


def run(folder: Path, *more: str) -> tuple[Path, str]:
    display = Listening()
    run_dir = train(small.config(folder, *ON, *more), display).run_dir
    return run_dir, "\n".join(display.lines)


@pytest.mark.parametrize("selection", ["positive", "top_fraction", "drop_lowest"])
def test_dropped_responses_are_dropped_and_the_file_says_which_and_why(tmp_path: Path, selection: str) -> None:
    run_dir, _ = run(tmp_path, f"trainer.tracin.selection={selection}", "trainer.influence_trace.enable=true")
    opened = open_run(run_dir)
    assert opened.steps("tracin") == [1, 2, 3, 4]
    records = {record["step"]: record for record in small.metrics(run_dir)}
    for step in opened.readable_steps("tracin"):
        validation = step["reason"] == int(TracinReason.VALIDATION)
        assert validation.sum() == 12 and np.isnan(step["score"][validation]).all()
        assert not set(step["group"][validation]) & set(step["group"][~validation])
        assert step.meta["selection"] == selection and "lowers the validation loss" in step.meta["sign"]
        kept, score = step["kept"][~validation], step["score"][~validation]
        assert 0 < kept.sum() < len(kept)
        assert score[kept].min() > score[~kept & np.isfinite(score) & (score != 0)].max()
        record = records[step.step]
        assert record["tracin/selected"] == kept.sum()
        assert record["tracin/positive"] == (score > 0).sum()
        assert record["tracin/val_generated"] == 12
        assert record["tracin/val_grad_norm/layer_0_attention"] > 0
        # Nothing that selection dropped reaches the update, where the influence trace sees every response.
        influence = opened.step("influence_trace", step.step)
        assert not set(influence["row"]) & set(np.flatnonzero(~kept))
        # A group without a contrast left is not one that the hooks have missed.
        assert not (influence["group_status"] == GroupStatus.NOT_CAPTURED).any()
    assert opened.verify() == []


def test_scores_of_another_unit_have_names_of_their_own(tmp_path: Path) -> None:
    """Before its first step Adam has nothing to weigh by: those scores are not in the same chart as the others."""
    run_dir, _ = run(tmp_path, "trainer.total_steps=2")
    first, second = (record for record in small.metrics(run_dir) if record["step"])
    for name in ("min_ip", "max_ip", "mean_ip", "std_ip"):
        assert f"tracin/plain_{name}" in first and f"tracin/{name}" not in first
        assert f"tracin/{name}" in second and f"tracin/plain_{name}" not in second
    opened = open_run(run_dir)
    assert [opened.step("tracin", step).meta["weighed"] for step in (1, 2)] == [False, True]
    plain, _ = run(tmp_path, "trainer.total_steps=1", "trainer.tracin.preconditioner=none")
    assert "tracin/mean_ip" in small.metrics(plain)[-1]


def test_extremes_of_the_validation_set_are_those_of_single_responses(tmp_path: Path) -> None:
    run_dir, _ = run(tmp_path, "trainer.total_steps=1")
    record, step = small.metrics(run_dir)[-1], open_run(run_dir).step("tracin", 1)
    validation = step["reason"] == int(TracinReason.VALIDATION)
    advantages = step["advantage"][validation]
    assert record["tracin/val_advantage_min"] == pytest.approx(advantages.min())
    assert record["tracin/val_advantage_max"] == pytest.approx(advantages.max())
    # −A Σ log-prob has the sign of A, and their mean is the loss.
    assert record["tracin/val_loss_min"] < 0 < record["tracin/val_loss_max"]
    assert record["tracin/val_loss_min"] < record["tracin/val_loss"] < record["tracin/val_loss_max"]
    assert record["tracin/val_loss_max"] == pytest.approx(12 * step.meta["val_loss_max"])


def test_scoring_only_leaves_training_as_it_was(tmp_path: Path) -> None:
    plain = train(small.config(tmp_path)).run_dir
    scored, _ = run(tmp_path, "trainer.tracin.selection=none")
    assert (plain / "policy/model.safetensors").read_bytes() == (scored / "policy/model.safetensors").read_bytes()


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_length"])
def test_the_update_is_normalised_over_what_was_kept(tmp_path: Path, aggregation: str) -> None:
    """Training on a batch with some responses dropped = training on a batch that never had them."""
    from gradtrace.metrics import Timer

    knobs = (f"algorithm.aggregation={aggregation}", "actor.mini_batch_size=0", "actor.optim.grad_clip=0")
    weights = []
    for drop_by_flag in (True, False):
        trainer = small.trainer(tmp_path, *knobs)
        batch, _ = trainer.experience.collect(trainer.components.generators["rollout"], Timer())
        kept = torch.arange(len(batch)) % 3 != 1
        advantages = trainer.estimator  # advantages come before selection, over whole groups
        trainer.estimator = _fixed(advantages, batch)
        if drop_by_flag:
            trainer.steps.begin = lambda b, step, kept=kept: b.replace(kept=kept)
        else:
            batch = batch.select(kept)
            trainer.estimator = _rows(trainer.estimator, kept)
        trainer.train_step(batch, 1, Timer())
        weights.append({name: p.detach().clone() for name, p in trainer.components.policy.model.named_parameters()})
    for name, tensor in weights[0].items():
        assert torch.allclose(tensor, weights[1][name], rtol=1e-4, atol=1e-6), name


def _fixed(estimator, batch):
    from gradtrace.algorithms import AdvantageInputs

    outputs = estimator(AdvantageInputs(batch.rewards, batch.group, batch.response_mask))
    return _Constant(outputs, estimator.needs)


def _rows(constant, kept):
    columns = constant.outputs.advantages[kept]
    return _Constant(dataclasses.replace(constant.outputs, advantages=columns), constant.needs)


@dataclasses.dataclass
class _Constant:
    outputs: object
    needs: frozenset

    def __call__(self, inputs):
        width = inputs.mask.shape[1]
        return dataclasses.replace(self.outputs, advantages=self.outputs.advantages[:, :width])


def test_a_critic_does_not_stand_in_the_way(tmp_path: Path) -> None:
    """Token-level advantages of a critic in training, group-relative ones in validation."""
    run_dir, _ = run(tmp_path, "algorithm.advantage=gae", "trainer.total_steps=2")
    record = small.metrics(run_dir, timings=True)[-1]
    assert record["tracin/selected"] == record["perf/trained_responses"] < 12


def test_soft_selection_weighs_advantages_and_drops_nothing(tmp_path: Path) -> None:
    run_dir, _ = run(tmp_path, "trainer.tracin.selection=soft")
    step = open_run(run_dir).step("tracin", 2)
    own = step["reason"] != int(TracinReason.VALIDATION)
    assert step["kept"][own].all()
    assert np.corrcoef(step["weight"][own], step["score"][own])[0, 1] > 0.8


@pytest.mark.parametrize(
    "more",
    [
        ("trainer.tracin.train_on_validation=true",),
        ("trainer.tracin.val_refresh_every=3", *EXTREME),
    ],
)
def test_a_resumed_run_is_bit_identical(tmp_path: Path, more: tuple[str, ...]) -> None:
    settings = small.config(tmp_path, *ON, "actor.optim.schedule_steps=5", *more)
    settings.trainer.total_steps = 5
    straight = train(settings).run_dir
    stopped = dataclasses.replace(settings, trainer=dataclasses.replace(settings.trainer, total_steps=2))
    first_part = train(stopped).run_dir
    torch.manual_seed(12345)
    train(small.resume(first_part, "trainer.total_steps=5"))
    assert small.metrics(first_part) == small.metrics(straight)
    assert files(straight, 5) == files(first_part, 5)


def test_trusted_rollouts_are_trained_on_and_neither_scored_nor_dropped(tmp_path: Path) -> None:
    """And the selection among the others is what it is without them: they are no part of what is scored."""
    knobs = ("trainer.total_steps=1", "trainer.tracin.selection=positive", "reward.flip_probability=0.3")
    alone, _ = run(tmp_path, *knobs)
    run_dir, _ = run(tmp_path, *knobs, "trainer.tracin.train_on_validation=true", *TRACED)
    step, other = (open_run(path).step("tracin", 1) for path in (run_dir, alone))
    trusted = step["reason"] == int(TracinReason.VALIDATION)
    assert trusted.sum() == 12 and step["kept"][trusted].all() and not other["kept"][trusted].any()
    assert np.isnan(step["score"][trusted]).all() and (step["weight"][trusted] == 1).all()
    assert np.array_equal(step["kept"][~trusted], other["kept"][~trusted])
    assert np.allclose(step["score"][~trusted], other["score"][~trusted], rtol=1e-4, atol=1e-7)
    record = small.metrics(run_dir, timings=True)[-1]
    assert record["perf/generated_responses"] == 24
    assert record["perf/trained_responses"] == step["kept"].sum() > other["kept"].sum()
    assert record["tracin/selected"] == step["kept"][~trusted].sum()
    # Other traces see them as responses of the batch, after its own.
    assert set(open_run(run_dir).step("entropy_trace", 1)["row"]) == set(range(24))
    weights = [(path / "policy/model.safetensors").read_bytes() for path in (run_dir, alone)]
    assert weights[0] != weights[1]


def test_trusted_rollouts_are_trained_on_unless_asked_otherwise(tmp_path: Path) -> None:
    default = "trainer.tracin.train_on_validation=null"
    run_dir, said = run(tmp_path, default, "trainer.total_steps=1")
    assert small.metrics(run_dir, timings=True)[-1]["perf/trained_responses"] > 12
    assert "validation rollouts are trained on, too" in said
    for knobs in (("trainer.tracin.selection=none",), EXTREME):
        assert not small.config(tmp_path, *ON, default, *knobs).trainer.tracin.trains_on_validation


def test_old_trusted_rollouts_are_not_trained_on_again_and_a_critic_learns_from_new_ones(
    tmp_path: Path,
) -> None:
    run_dir, _ = run(
        tmp_path,
        "trainer.tracin.train_on_validation=true",
        "trainer.tracin.val_refresh_every=3",
        "trainer.tracin.selection=soft",
        "algorithm.advantage=gae",
    )
    trained = [r["perf/trained_responses"] for r in small.metrics(run_dir, timings=True) if r["step"]]
    assert trained == [24, 12, 12, 24]


def test_old_validation_rollouts_are_reused_until_refreshed(tmp_path: Path) -> None:
    run_dir, _ = run(tmp_path, "trainer.tracin.val_refresh_every=3")
    generated = [r["tracin/val_generated"] for r in small.metrics(run_dir) if r["step"]]
    assert generated == [12, 0, 0, 12]
    assert [r["perf/generated_responses"] for r in small.metrics(run_dir, timings=True) if r["step"]] == [
        24,
        12,
        12,
        24,
    ]
    steps = [step.meta["validation_step"] for step in open_run(run_dir).readable_steps("tracin")]
    assert steps == [1, 1, 1, 4]


# ---------------------------------------------------------------- the validation set


def grouped(rewards: list[list[float]]):
    batch = small.random_batch(groups=len(rewards), n=len(rewards[0]))
    return batch.replace(rewards=torch.tensor(rewards, dtype=torch.float32).flatten())


def test_strategies_choose_by_reward_and_prefer_groups_with_a_contrast() -> None:
    batch = grouped([[0, 0, 0], [0, 0, 1], [1, 1, 1], [0, 1, 1], [0, 0, 1]])
    assert choose_groups(batch, "lowest_reward", 2).tolist() == [1, 4]
    assert choose_groups(batch, "highest_reward", 1).tolist() == [3]
    assert choose_groups(batch, "random", 3).tolist() == [0, 1, 2]
    assert choose_groups(grouped([[0, 0, 0, 1], [0, 1, 0, 1], [1, 1, 0, 1]]), "balanced", 1).tolist() == [1]
    assert choose_groups(batch, "lowest_reward", 5).tolist() == [0, 1, 2, 3, 4]


def test_the_most_extreme_responses_are_chosen_whatever_their_prompt() -> None:
    batch = grouped([[0.1, 0.9, 0.2], [0.3, 0.4, 0.5], [0.8, 0.0, 0.6], [0.55, 0.45, 0.35]])
    for strategy, wanted in [
        ("lowest_reward", {0.0, 0.1, 0.2, 0.3, 0.35, 0.4}),
        ("highest_reward", {0.9, 0.8, 0.6, 0.55, 0.5, 0.45}),
        ("balanced", {0.0, 0.1, 0.2, 0.6, 0.8, 0.9}),
    ]:
        chosen, groups = extreme_responses(batch, strategy, one_in=2)
        rewards = chosen.rewards.tolist()
        assert {round(reward, 2) for reward in rewards} == wanted
        assert [chosen.prompts[g] for g in chosen.group] == [
            batch.prompts[batch.rewards.tolist().index(reward) // 3] for reward in rewards
        ]
        assert len(groups) == len(chosen.prompts) == len(chosen.group.unique())
        # Against all that were sampled: the lowest ones are bad, though there is no better one beside them.
        signs = torch.sign(chosen.advantages[:, 0])
        assert torch.equal(signs, torch.sign(chosen.rewards - batch.rewards.mean()))


@pytest.mark.parametrize(
    ("knob", "words"),
    [
        ("trainer.tracin.val_strategy=random", "val_strategy to lowest_reward"),
        ("trainer.tracin.train_on_validation=true", "would be biased"),
    ],
)
def test_responses_by_reward_are_refused_where_they_make_no_sense(tmp_path: Path, knob: str, words: str) -> None:
    with pytest.raises(GradtraceError, match=words):
        small.config(tmp_path, *ON, *EXTREME, knob)


@pytest.mark.parametrize("strategy", ["lowest_reward", "highest_reward", "balanced"])
def test_choosing_strategies_count_all_candidates_as_generated(tmp_path: Path, strategy: str) -> None:
    run_dir, _ = run(tmp_path, f"trainer.tracin.val_strategy={strategy}", "trainer.total_steps=1")
    record = small.metrics(run_dir)[-1]
    assert record["tracin/val_generated"] == 24 and record["tracin/val_prompts"] == 4


def test_reported_validation_prompts_are_not_used_for_selection(tmp_path: Path) -> None:
    parts = small.components(tmp_path)
    reported = {tuple(prompt.ids) for prompt in parts.task.validation_prompts(4)}
    run_dir, _ = run(tmp_path)
    for step in open_run(run_dir).readable_steps("tracin"):
        for g in range(step.n_groups):
            assert tuple(step.group(g).prompt_ids.tolist()) not in reported


def prompt_file(folder: Path, prompts: list[str]) -> str:
    path = folder / "val.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return f"trainer.tracin.val_files=[{path}]"


def test_a_file_of_the_users_own(tmp_path: Path) -> None:
    run_dir, _ = run(tmp_path, prompt_file(tmp_path, ["1+2*3=", "4-1+1="]), "trainer.total_steps=1")
    record = small.metrics(run_dir)[-1]
    assert record["tracin/val_prompts"] == 2 and record["tracin/val_generated"] == 6


def test_an_empty_validation_file_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(GradtraceError, match=r"trainer\.tracin\.val_files.*no rows"):
        run(tmp_path, prompt_file(tmp_path, []))


def test_a_file_with_something_else_names_the_row(tmp_path: Path) -> None:
    with pytest.raises(GradtraceError, match=r"row 1 is no problem of the arithmetic task.*What is 2\+2"):
        run(tmp_path, prompt_file(tmp_path, ["1+2*3=", "What is 2+2?"]))


def test_validation_prompts_that_are_trained_on_are_left_out_and_reported(tmp_path: Path) -> None:
    trained = [prompt.item["prompt"] for prompt in small.components(tmp_path).task.next_prompts(4)]
    run_dir, said = run(tmp_path, prompt_file(tmp_path, [trained[0], "1+2*3="]), "trainer.total_steps=1")
    record = small.metrics(run_dir)[-1]
    assert record["tracin/val_overlap"] == 1 and record["tracin/val_prompts"] == 1
    assert "1 validation prompts are in the training batch too" in said


def test_validation_that_is_all_trained_on_keeps_everything_and_says_why(tmp_path: Path) -> None:
    trained = [prompt.item["prompt"] for prompt in small.components(tmp_path).task.next_prompts(4)]
    run_dir, said = run(tmp_path, prompt_file(tmp_path, trained[:2]), "trainer.total_steps=1")
    record = small.metrics(run_dir)[-1]
    assert record["tracin/selected"] == 12 and record["tracin/no_signal"] == 1
    assert "keeps every response" in said


def test_constant_rewards_keep_everything_and_say_why(tmp_path: Path) -> None:
    (tmp_path / "constant.py").write_text(CONSTANT)
    run_dir, said = run(tmp_path, f"reward.path={tmp_path / 'constant.py'}:constant", "trainer.total_steps=2")
    record = small.metrics(run_dir)[-1]
    assert record["tracin/selected"] == 12 and record["tracin/no_signal"] == 1
    assert said.count("keeps every response: the validation set has no prompt whose responses differ") == 1
    step = open_run(run_dir).step("tracin", 1)
    assert "validation gradient is zero" in " ".join(diagnose_step(step))


def test_one_response_per_validation_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GradtraceError, match="at least 2 responses per validation prompt"):
        small.config(tmp_path, *ON, "trainer.tracin.val_n=1")


def test_ghost_over_all_parameters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GradtraceError, match="linear layers only"):
        small.config(tmp_path, *ON, "trainer.tracin.method=ghost", "trainer.tracin.parameters=all")


# ---------------------------------------------------------------- diagnosis and flips


def test_the_stored_step_gives_the_diagnosis_that_was_logged(tmp_path: Path) -> None:
    run_dir, said = run(tmp_path, "trainer.tracin.diagnose_every=2")
    for step in open_run(run_dir).readable_steps("tracin"):
        measured = step.step in (1, 2, 4)
        assert ("score_low" in step) == ("train_norm" in step.meta) == measured
        if measured:
            assert diagnose_step(step) == step.meta["diagnosis"]
            assert (step["score_low"] <= step["score_high"])[step["row"] >= 0].all()
    assert "too small to tell helpful from harmful" in said


def test_flips_hit_training_rewards_at_the_given_rate_and_are_marked(tmp_path: Path) -> None:
    batch = small.random_batch(groups=200, n=10).replace(rewards=(torch.arange(2000) % 2).float())
    flipped = flip_rewards(batch, 0.3, torch.Generator().manual_seed(0))
    assert 0.26 < float(flipped.flipped.float().mean()) < 0.34
    assert torch.equal(flipped.rewards != batch.rewards, flipped.flipped)
    run_dir, _ = run(tmp_path, "reward.flip_probability=0.5", "trainer.total_steps=1")
    step = open_run(run_dir).step("tracin", 1)
    validation = step["reason"] == int(TracinReason.VALIDATION)
    assert step["flipped"].any() and not step["flipped"][validation].any()
    assert "tracin/dropped_of_flipped" in small.metrics(run_dir)[-1]
