"""Advantages against arithmetic done by hand, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradtrace.algorithms import AdvantageInputs, advantage, advantage_names
from gradtrace.errors import GradtraceError


def rewards_of(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def full_mask(rows: int, length: int = 1) -> Tensor:
    return torch.ones(rows, length, dtype=torch.bool)


def estimate(name: str, inputs: AdvantageInputs, **options: object) -> Tensor:
    return advantage(name, **options)(inputs).advantages


TWO_GROUPS = torch.tensor([5, 5, 5, 5, 9, 9])
TWO_GROUP_REWARDS = rewards_of(1, 0, 0, 1, 3, 1)


def test_grpo_by_hand() -> None:
    # Group 5: mean 1/2, deviations ±1/2, sample variance 4·(1/4)/3 = 1/3. Group 9: mean 2, ±1, variance 2/1 = 2.
    inputs = AdvantageInputs(TWO_GROUP_REWARDS, TWO_GROUPS, full_mask(6))
    a, b = 0.5 / (math.sqrt(1 / 3) + 1e-6), 1 / (math.sqrt(2) + 1e-6)
    torch.testing.assert_close(estimate("grpo", inputs).squeeze(-1), rewards_of(a, -a, -a, a, b, -b))


@pytest.mark.parametrize(("name", "options"), [("grpo", {"normalize_std": False}), ("dr_grpo", {})])
def test_without_std_the_advantage_is_the_deviation_from_the_group_mean(name: str, options: dict) -> None:
    inputs = AdvantageInputs(TWO_GROUP_REWARDS, TWO_GROUPS, full_mask(6))
    expected = rewards_of(0.5, -0.5, -0.5, 0.5, 1, -1)
    torch.testing.assert_close(estimate(name, inputs, **options).squeeze(-1), expected)


def test_rloo_by_hand() -> None:
    # Group 5, first response: 1 − (0 + 0 + 1)/3 = 2/3; second: 0 − (1 + 0 + 1)/3 = −2/3. Group 9: 3 − 1 and 1 − 3.
    inputs = AdvantageInputs(TWO_GROUP_REWARDS, TWO_GROUPS, full_mask(6))
    expected = rewards_of(2 / 3, -2 / 3, -2 / 3, 2 / 3, 2, -2)
    torch.testing.assert_close(estimate("rloo", inputs).squeeze(-1), expected)


def test_response_advantages_stand_at_every_token_and_nowhere_else() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    result = estimate("dr_grpo", AdvantageInputs(rewards_of(1, 0), torch.tensor([0, 0]), mask))
    assert result.tolist() == [[0.5, 0.5, 0.0], [-0.5, 0.0, 0.0]]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_constant_group_gets_exactly_zero_in_float32(name: str) -> None:
    # 0.1 in float32: the mean of seven of them is off by a rounding, which ε = 1e-6 would not hide.
    rewards = torch.full((7,), 0.1)
    result = estimate(name, AdvantageInputs(rewards, torch.zeros(7, dtype=torch.long), full_mask(7)))
    assert (result == 0).all()


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_a_group_of_one_is_an_error_that_says_what_to_do(name: str) -> None:
    inputs = AdvantageInputs(rewards_of(1, 0, 1), torch.tensor([0, 0, 4]), full_mask(3))
    with pytest.raises(GradtraceError, match=r"group 4 .*n=1 carries no contrast.* n ≥ 2"):
        estimate(name, inputs)


def test_a_reward_that_is_not_a_number_is_named() -> None:
    with pytest.raises(GradtraceError, match=r"response 1 \(group 3\) is nan"):
        AdvantageInputs(rewards_of(1, math.nan), torch.tensor([3, 3]), full_mask(2))


MASK_2_1 = torch.tensor([[True, True], [True, False]])


def test_reinforce_plus_plus_by_hand() -> None:
    # γ = 1/2. Row 0: reward 4 at its second token, so returns 2, 4. Row 1: reward 0, returns 0.
    # Three tokens: mean 2, sample variance (0 + 4 + 4)/2 = 4.
    inputs = AdvantageInputs(rewards_of(4, 0), torch.tensor([0, 1]), MASK_2_1)
    scale = 1 / math.sqrt(4 + 1e-8)
    expected = torch.tensor([[0, 2 * scale], [-2 * scale, 0]], dtype=torch.float64)
    torch.testing.assert_close(estimate("reinforce_plus_plus", inputs, gamma=0.5), expected)


def test_reinforce_plus_plus_with_kl_in_the_reward() -> None:
    # KL per token log π_old − log π_ref: row 0 has 1 and 2, row 1 has −1. With coefficient 1/2 and γ = 1:
    # rewards −0.5, 4 − 1 and 0 + 0.5; returns 2.5, 3 and 0.5; mean 2; deviations 0.5, 1, −1.5; variance 3.5/2.
    old = torch.tensor([[-1.0, -1.0], [-2.0, math.nan]], dtype=torch.float64)
    ref = torch.tensor([[-2.0, -3.0], [-1.0, math.nan]], dtype=torch.float64)
    inputs = AdvantageInputs(rewards_of(4, 0), torch.tensor([0, 1]), MASK_2_1, old_log_probs=old, ref_log_probs=ref)
    scale = 1 / math.sqrt(1.75 + 1e-8)
    expected = torch.tensor([[0.5 * scale, scale], [-1.5 * scale, 0]], dtype=torch.float64)
    torch.testing.assert_close(estimate("reinforce_plus_plus", inputs, kl_coef=0.5), expected)


def test_gae_by_hand() -> None:
    # γ = 1/2, λ = 1/2. Row 0: V = 1, 2, reward 4: δ_1 = 4 − 2 = 2; δ_0 = 0 + ½·2 − 1 = 0; A_1 = 2, A_0 = 0 + ¼·2.
    # Row 1: V = 3, reward 1: A_0 = 1 − 3 = −2. Returns A + V: 1.5, 4 and 1.
    values = torch.tensor([[1.0, 2.0], [3.0, math.nan]], dtype=torch.float64)
    inputs = AdvantageInputs(rewards_of(4, 1), torch.tensor([0, 1]), MASK_2_1, values=values)
    outputs = advantage("gae", gamma=0.5, lam=0.5, whiten_advantages=False)(inputs)
    assert outputs.advantages.tolist() == [[0.5, 2.0], [-2.0, 0.0]]
    assert outputs.returns is not None
    assert outputs.returns.tolist() == [[1.5, 4.0], [1.0, 0.0]]


def test_gae_whitening_changes_the_advantages_and_not_the_returns() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 0.0]], dtype=torch.float64)
    inputs = AdvantageInputs(rewards_of(4, 1), torch.tensor([0, 1]), MASK_2_1, values=values)
    plain = advantage("gae", whiten_advantages=False)(inputs)
    white = advantage("gae")(inputs)
    torch.testing.assert_close(white.returns, plain.returns)
    tokens = white.advantages[MASK_2_1]
    assert tokens.mean().item() == pytest.approx(0, abs=1e-12)
    assert tokens.std().item() == pytest.approx(1, rel=1e-6)


def test_gae_with_lambda_one_is_the_return_minus_the_value() -> None:
    values = torch.randn(3, 6, dtype=torch.float64)
    inputs = AdvantageInputs(rewards_of(1, 2, -1), torch.arange(3), full_mask(3, 6), values=values)
    outputs = advantage("gae", gamma=1.0, lam=1.0, whiten_advantages=False)(inputs)
    torch.testing.assert_close(outputs.advantages, rewards_of(1, 2, -1).unsqueeze(-1) - values)


def test_gae_steps_over_masked_tokens_inside_a_response() -> None:
    # Tool output in the middle must not count as a step: the same tokens without the gap give the same numbers.
    mask = torch.tensor([[True, False, False, True, True]])
    values = torch.tensor([[0.3, math.nan, 9.0, -0.2, 0.7]], dtype=torch.float64)
    group, rewards = torch.tensor([0]), rewards_of(2)
    options = {"gamma": 0.9, "lam": 0.8, "whiten_advantages": False}
    gap = advantage("gae", **options)(AdvantageInputs(rewards, group, mask, values=values))
    dense = advantage("gae", **options)(
        AdvantageInputs(rewards, group, full_mask(1, 3), values=values[mask].unsqueeze(0))
    )
    torch.testing.assert_close(gap.advantages[mask], dense.advantages[0])
    assert (gap.advantages[~mask] == 0).all()


def test_needs_say_which_columns_to_compute() -> None:
    assert advantage("gae").needs == {"values"}
    assert advantage("gae", kl_coef=0.1).needs == {"values", "old_log_probs", "ref_log_probs"}
    assert advantage("reinforce_plus_plus").needs == frozenset()
    inputs = AdvantageInputs(rewards_of(1), torch.tensor([0]), full_mask(1))
    with pytest.raises(GradtraceError, match=r"gae.* needs values"):
        advantage("gae")(inputs)
    with pytest.raises(GradtraceError, match="needs old_log_probs"):
        advantage("reinforce_plus_plus", kl_coef=0.1)(inputs)


def test_a_response_without_tokens_has_no_advantage_and_harms_nothing() -> None:
    mask = torch.tensor([[True, True], [False, False]])
    values = torch.zeros(2, 2, dtype=torch.float64)
    for name in advantage_names():
        inputs = AdvantageInputs(rewards_of(1, 0), torch.tensor([0, 0]), mask, values=values)
        result = estimate(name, inputs)
        assert torch.isfinite(result).all(), name
        assert (result[1] == 0).all(), name


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rewards, groups of two and more in any order, prefix masks, values."""
    sizes = draw(st.lists(st.integers(2, 4), min_size=1, max_size=4))
    group = draw(st.permutations([i for i, size in enumerate(sizes) for _ in range(size)]))
    rewards = draw(st.lists(st.sampled_from([0.0, 1.0, -0.5, 0.3]), min_size=len(group), max_size=len(group)))
    lengths = draw(st.lists(st.integers(0, 5), min_size=len(group), max_size=len(group)))
    seed = draw(st.integers(0, 2**31))
    values = torch.randn(len(group), 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(5) < torch.tensor(lengths).unsqueeze(-1)
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(group), mask, values


def all_estimates(rewards: Tensor, group: Tensor, mask: Tensor, values: Tensor) -> dict[str, Tensor]:
    columns = {"values": values, "old_log_probs": values.sin(), "ref_log_probs": values.cos()}
    inputs = AdvantageInputs(rewards, group, mask, **columns)
    return {name: estimate(name, inputs) for name in ("grpo", "dr_grpo", "rloo")} | {
        name: estimate(name, inputs, gamma=0.9, kl_coef=0.1) for name in ("reinforce_plus_plus", "gae")
    }


@settings(deadline=None, max_examples=40)
@given(batch=batches(), seed=st.integers(0, 2**31))
def test_reordering_the_responses_reorders_the_advantages(batch: tuple[Tensor, ...], seed: int) -> None:
    order = torch.randperm(len(batch[0]), generator=torch.Generator().manual_seed(seed))
    straight = all_estimates(*batch)
    shuffled = all_estimates(*(column[order] for column in batch))
    for name, expected in straight.items():
        torch.testing.assert_close(shuffled[name], expected[order], rtol=1e-9, atol=1e-9, msg=name)


@settings(deadline=None, max_examples=40)
@given(batch=batches())
def test_group_numbers_are_only_names(batch: tuple[Tensor, ...]) -> None:
    rewards, group, mask, values = batch
    renamed = all_estimates(rewards, 1000 - 7 * group, mask, values)
    for name, expected in all_estimates(rewards, group, mask, values).items():
        torch.testing.assert_close(renamed[name], expected, rtol=1e-9, atol=1e-9, msg=name)


@settings(deadline=None, max_examples=40)
@given(batch=batches(), junk=st.sampled_from([math.nan, math.inf, -1e30]))
def test_padding_values_never_matter(batch: tuple[Tensor, ...], junk: float) -> None:
    rewards, group, mask, values = batch
    expected = all_estimates(rewards, group, mask, values)
    spoilt = all_estimates(rewards, group, mask, values.masked_fill(~mask, junk))
    for name in expected:
        assert torch.equal(spoilt[name], expected[name]), name
        assert (spoilt[name][~mask] == 0).all(), name


@settings(deadline=None, max_examples=40)
@given(batch=batches())
def test_group_relative_advantages_sum_to_zero_in_every_group(batch: tuple[Tensor, ...]) -> None:
    rewards, group, _, _ = batch
    inputs = AdvantageInputs(rewards, group, full_mask(len(group)))
    for name in ("grpo", "dr_grpo", "rloo"):
        sums = torch.zeros(10, dtype=torch.float64).index_add(0, group, estimate(name, inputs).squeeze(-1))
        torch.testing.assert_close(sums, torch.zeros_like(sums), rtol=0, atol=1e-9, msg=name)
