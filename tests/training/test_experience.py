"""Rollout and reward: dynamic sampling, length penalty, validation figures."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradtrace.errors import GradtraceError
from gradtrace.metrics import Timer
from gradtrace.tasks.rewards import RewardFunction, add_rewards, named_reward
from gradtrace.training.experience import pass_at_k, validate
from gradtrace.training.loop import Trainer
from tests.training.small import trainer


def dapo(tmp_path: Path, reward: Any, *more: str) -> Trainer:
    run = trainer(tmp_path, "algorithm.dynamic_sampling.enable=true", *more)
    run.experience.reward = RewardFunction("test", reward)
    return run


def collect(run: Trainer) -> Any:
    return run.experience.collect(run.components.generators["rollout"], Timer())


def some_prompts_mixed(response: str, item: dict[str, Any]) -> float:
    """Only chains that begin with an even digit have rewards that differ."""
    return float(len(response)) + response.count("1") / 7 if int(item["prompt"][0]) % 2 == 0 else 1.0


def test_dynamic_sampling_refills_until_the_batch_is_full_of_mixed_groups(tmp_path: Path) -> None:
    batch, metrics = collect(dapo(tmp_path, some_prompts_mixed, "data.train_batch_size=6"))
    assert len(batch.prompts) == 6 and len(batch) == 18
    rewards = batch.rewards.view(6, 3)
    assert (rewards.amax(-1) > rewards.amin(-1)).all()
    assert metrics["rollout/batches"] > 1
    assert metrics["rollout/groups_sampled"] > metrics["rollout/groups_kept"] == 6


def test_parts_of_rewards_are_means_over_all_that_was_sampled(tmp_path: Path) -> None:
    run = dapo(tmp_path, some_prompts_mixed, "data.train_batch_size=6")
    lengths: list[float] = []

    def judged(response: str, item: dict[str, Any]) -> float:
        lengths.append(float(len(response)))
        return some_prompts_mixed(response, item)

    run.experience.reward = add_rewards(RewardFunction("main", judged), {"think_format": 0.0})
    main = run.experience.reward.parts
    _, metrics = collect(run)
    assert metrics["rollout/batches"] > 1 and len(main["main"]) < len(lengths)
    assert metrics["reward_part/main"] == pytest.approx(metrics["critic/score/mean"])


def test_kept_groups_keep_their_own_prompts_items_and_texts(tmp_path: Path) -> None:
    run = dapo(tmp_path, some_prompts_mixed, "data.train_batch_size=6")
    batch, _ = collect(run)
    tokenizer = run.components.task.tokenizer
    for row, group in enumerate(batch.group.tolist()):
        assert tokenizer.decode(batch.prompts[group]) == batch.items[group]["prompt"]
        ids = batch.responses[row, : int(batch.response_lengths[row])].tolist()
        assert tokenizer.decode(ids, skip_special_tokens=True) == batch.texts[row]
        assert float(batch.rewards[row]) == pytest.approx(some_prompts_mixed(batch.texts[row], batch.items[group]))


def test_dynamic_sampling_gives_up_with_what_it_has(tmp_path: Path) -> None:
    rare = iter([0.0, 1.0])
    run = dapo(tmp_path, lambda r, i: next(rare, 0.5), "algorithm.dynamic_sampling.max_batches=2")
    batch, metrics = collect(run)
    assert len(batch.prompts) == 1 and metrics["rollout/batches"] == 2


def test_no_mixed_prompt_at_all_is_an_error_that_explains_itself(tmp_path: Path) -> None:
    run = dapo(tmp_path, lambda response, item: 0.0, "algorithm.dynamic_sampling.max_batches=3")
    with pytest.raises(GradtraceError, match=r"no prompt whose 3 responses differ.*12 prompts of 3 rollouts"):
        collect(run)


def test_constant_rewards_without_dynamic_sampling_leave_the_weights(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.experience.reward = RewardFunction("test", lambda response, item: 1.0)
    before = [p.detach().clone() for p in run.components.policy.model.parameters()]
    batch, metrics = collect(run)
    run.train_step(batch, 1, Timer())
    assert metrics["rollout/groups_constant"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, run.components.policy.model.parameters(), strict=True))


def test_overlong_penalty_changes_rewards_but_not_the_score(tmp_path: Path) -> None:
    run = trainer(tmp_path, "algorithm.overlong.enable=true", "algorithm.overlong.buffer=4")
    run.experience.reward = RewardFunction("test", lambda response, item: 1.0)
    batch, metrics = collect(run)
    expected = 1 - ((batch.response_lengths - 4) / 4).clamp(0, 1)
    torch.testing.assert_close(batch.rewards, expected)
    assert metrics["critic/score/mean"] == 1.0 and float(batch.rewards.min()) < 1


@pytest.mark.parametrize("shape", ["cosine", "shortest"])
def test_length_shaping_changes_rewards_but_not_the_score(tmp_path: Path, shape: str) -> None:
    shaping = [f"algorithm.length_shaping.shape={shape}", "algorithm.length_shaping.strength=0.5"]
    run = trainer(tmp_path, *shaping, "rollout.max_new_tokens=40", "rollout.n=8")
    run.experience.reward = RewardFunction("test", lambda response, item: 1.0)
    batch, metrics = collect(run)
    assert metrics["critic/score/mean"] == 1.0
    assert batch.rewards is not None
    for group in batch.group.unique():
        rows = (batch.group == group).nonzero().squeeze(1)
        by_length = rows[batch.response_lengths[rows].argsort()]
        assert (batch.rewards[by_length].diff() <= 1e-6).all()
    assert float(batch.rewards.max()) > float(batch.rewards.min()) >= 0.5


def test_rewards_by_name_judge_the_whole_rollout_with_extras(tmp_path: Path) -> None:
    """`math` in its worker processes; the tiny model writes digits, so that some answers are right."""
    names = ["reward.path=", "reward.name=math", "reward.options={workers: 1, timeout: 20}"]
    run = trainer(tmp_path, *names, "reward.extra={marker_format: 0.5}", "data.train_batch_size=96")
    batch, _ = collect(run)
    assert batch.rewards is not None and batch.texts is not None
    items = [batch.items[group] for group in batch.group.tolist()]
    expected = named_reward("math", {"workers": 1, "timeout": 20.0})(batch.texts, items)
    assert batch.rewards.tolist() == expected
    assert set(expected) == {0.0, 1.0}


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_response(case: tuple[int, int, int]) -> None:
    n, right, k = case
    subsets = list(combinations(range(n), k))
    share = sum(any(i < right for i in subset) for subset in subsets) / len(subsets)
    assert pass_at_k(n, right, k) == pytest.approx(share)


def test_validation_is_repeatable_and_draws_nothing_from_training(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    parts = run.components
    state = parts.generators["rollout"].get_state()
    position = parts.task.state_dict()
    first, second = (validate(parts) for _ in range(2))
    assert first == second and "val-core/arithmetic/reward/mean@4" in first
    assert torch.equal(state, parts.generators["rollout"].get_state()) and position == parts.task.state_dict()
