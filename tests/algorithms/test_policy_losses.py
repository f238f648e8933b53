"""Policy losses against arithmetic done by hand, and their gradients against closed forms, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gradtrace.algorithms import (
    Denominator,
    LossInputs,
    LossOutputs,
    aggregate,
    high_entropy_tokens,
    policy_loss,
    policy_loss_names,
    value_loss,
)
from gradtrace.algorithms.losses.archer import aspo_weights
from gradtrace.errors import GradtraceError


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def inputs_at(ratios: Tensor, advantages: Tensor, mask: Tensor | None = None, **columns: Tensor) -> LossInputs:
    """Inputs whose ratios π/π_old are these; log_probs is a leaf, so `.grad` of it is the gradient."""
    old = torch.full_like(ratios, -1.5)
    log_probs = (old + ratios.log()).requires_grad_()
    if mask is None:
        mask = torch.ones(ratios.shape, dtype=torch.bool)
    return LossInputs(log_probs, old, advantages, mask, **columns)


def gradient(outputs: LossOutputs, inputs: LossInputs) -> Tensor:
    """∂Σloss/∂log π, [R, T]."""
    return torch.autograd.grad(outputs.loss.sum(), inputs.log_probs)[0]


def close(actual: Tensor, *expected: float) -> None:
    torch.testing.assert_close(actual, row(*expected), rtol=1e-10, atol=1e-12)


# PPO --------------------------------------------------------------------------------------------------------


def test_ppo_by_hand() -> None:
    # A = +2: r = 1.1 inside, −2.2; r = 1.5 clipped at 1.2, −2.4; r = 0.5 is not clipped for a good token, −1.
    # A = −2: r = 0.5 clipped at 0.8, +1.6; r = 1.5 is not clipped for a bad token, +3; r = 5 capped at 3, +6.
    inputs = inputs_at(row(1.1, 1.5, 0.5, 0.5, 1.5, 5.0), row(2, 2, 2, -2, -2, -2))
    outputs = policy_loss("ppo")(inputs)
    close(outputs.loss, -2.2, -2.4, -1.0, 1.6, 3.0, 6.0)
    close(outputs.metrics["actor/pg_clipfrac"], 0, 1, 0, 1, 0, 0)
    close(outputs.metrics["actor/pg_clipfrac_lower"], 0, 0, 0, 0, 0, 1)
    close(outputs.metrics["actor/ppo_kl"], *(-math.log(r) for r in (1.1, 1.5, 0.5, 0.5, 1.5, 5.0)))
    # ∂(−A·r)/∂log π = −A·r where the loss moves, zero where it is clipped or capped
    close(gradient(outputs, inputs), -2.2, 0, -1.0, 0, 3.0, 0)


def test_clip_higher_lets_good_tokens_grow_further() -> None:
    # r = 1.25 is outside 1.2 and inside 1.28; 1.3 is clipped at 1.28; below, nothing has changed.
    outputs = policy_loss("ppo", clip_low=0.2, clip_high=0.28)(inputs_at(row(1.25, 1.3, 0.7), row(1, 1, -1)))
    close(outputs.loss, -1.25, -1.28, 0.8)


def test_without_dual_clip_a_bad_token_with_an_exploding_ratio_is_unbounded() -> None:
    outputs = policy_loss("ppo", dual_clip=None)(inputs_at(row(5.0), row(-2)))
    close(outputs.loss, 10.0)
    with pytest.raises(GradtraceError, match="must exceed 1"):
        policy_loss("ppo", dual_clip=0.5)(inputs_at(row(5.0), row(-2)))


@pytest.mark.parametrize("name", policy_loss_names())
def test_on_policy_the_gradient_is_minus_advantage_times_grad_log_prob(name: str) -> None:
    advantages = row(1.3, -0.7, 0.0, 2.0)
    inputs = inputs_at(row(1, 1, 1, 1), advantages, entropies=row(0.1, 2.0, 0.3, 0.4))
    options = {"kl_low_entropy": 0.0} if name == "archer" else {}
    outputs = policy_loss(name, **options)(inputs)
    torch.testing.assert_close(gradient(outputs, inputs), -advantages, rtol=1e-12, atol=1e-12)


# GSPO -------------------------------------------------------------------------------------------------------


def test_gspo_by_hand() -> None:
    # Row 0: ratios 2 and 1/8, geometric mean (1/4)^½ = 1/2. Row 1: 1.21 alone. Clip range ±0.3.
    mask = torch.tensor([[True, True], [True, False]])
    ratios = torch.tensor([[2.0, 0.125], [1.21, 1.0]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, 1.0], [-2.0, 0.0]], dtype=torch.float64)
    inputs = inputs_at(ratios, advantages, mask)
    outputs = policy_loss("gspo", clip_low=0.3, clip_high=0.3)(inputs)
    # Row 0, A = 1: max(−0.5, −0.7) = −0.5, moving. Row 1, A = −2: max(2.42, 2·1.21) = 2.42.
    expected = torch.tensor([[-0.5, -0.5], [2.42, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(outputs.loss, expected)
    torch.testing.assert_close(gradient(outputs, inputs), expected)


def test_gspo_clips_the_response_as_a_whole() -> None:
    # Ratios 2 and 1: the second token by itself is at 1, yet s = √2 > 1.2 silences both.
    inputs = inputs_at(row(2.0, 1.0), row(1, 1))
    outputs = policy_loss("gspo", clip_low=0.2, clip_high=0.2)(inputs)
    close(gradient(outputs, inputs), 0, 0)
    close(outputs.metrics["actor/pg_clipfrac"], 1, 1)


def test_gspo_straight_through_gradient_is_that_of_the_sequence_objective() -> None:
    mask = torch.tensor([[True] * 4, [True] * 2 + [False] * 2])
    ratios = torch.tensor([[1.1, 0.9, 1.3, 0.8], [1.2, 0.7, 1, 1]], dtype=torch.float64)
    per_response = torch.tensor([1.5, -0.5], dtype=torch.float64)
    inputs = inputs_at(ratios, per_response.unsqueeze(-1).expand(2, 4), mask)
    loss = aggregate(policy_loss("gspo", clip_low=1, clip_high=9)(inputs).loss, mask, "sequence_mean")
    ours = torch.autograd.grad(loss, inputs.log_probs)[0]
    # −mean_r A_r s_r with s_r = exp(mean_t log ratio), differentiated by autograd
    log_ratio = (inputs.log_probs - inputs.old_log_probs) * mask
    objective = -(per_response * (log_ratio.sum(-1) / mask.sum(-1)).exp()).mean()
    torch.testing.assert_close(loss, objective)
    torch.testing.assert_close(ours, torch.autograd.grad(objective, inputs.log_probs)[0])


# CISPO ------------------------------------------------------------------------------------------------------


def test_cispo_by_hand() -> None:
    # log π = −1.5 + log r. Weights: 0.5 stays, 7 is cut to 5; both keep their gradient.
    inputs = inputs_at(row(0.5, 7.0, 7.0), row(1, 1, -2))
    outputs = policy_loss("cispo")(inputs)
    log_probs = [-1.5 + math.log(r) for r in (0.5, 7, 7)]
    close(outputs.loss, -0.5 * log_probs[0], -5 * log_probs[1], 10 * log_probs[2])
    close(gradient(outputs, inputs), -0.5, -5.0, 10.0)
    close(outputs.metrics["actor/pg_clipfrac"], 0, 1, 1)


def test_cispo_can_bound_the_weight_from_below() -> None:
    inputs = inputs_at(row(0.5, 1.5), row(1, 1))
    outputs = policy_loss("cispo", clip_low=0.2, clip_high=0.2)(inputs)
    close(gradient(outputs, inputs), -0.8, -1.2)


# Archer and ASPO --------------------------------------------------------------------------------------------

# One response of six tokens; the 0.8 quantile of the entropies 0…5 is 4, so only the token with 5 is high.
LOW_THEN_HIGH = row(0, 1, 2, 3, 4, 5)


def archer_gradient_weight(ratio: float, advantage: float, high_entropy: bool) -> float:
    """Weight w in the gradient −A·w·∇log π of a single token of the response."""
    position = 5 if high_entropy else 0
    ratios, advantages = torch.ones(1, 6, dtype=torch.float64), torch.zeros(1, 6, dtype=torch.float64)
    ratios[0, position], advantages[0, position] = ratio, advantage
    inputs = inputs_at(ratios, advantages, entropies=LOW_THEN_HIGH)
    outputs = policy_loss("archer", kl_low_entropy=0.0)(inputs)
    return float(-gradient(outputs, inputs)[0, position] / advantage)


@pytest.mark.parametrize(
    ("ratio", "advantage", "high_entropy", "weight"),
    [
        # The checks of SCIENCE.md 5, at A = +1: 1/r, capped at 3, clipped at r ≤ 1 + ε
        (0.5, 1.0, False, 2.0),
        (0.5, 1.0, True, 2.0),
        (0.2, 1.0, False, 3.0),
        (0.2, 1.0, True, 3.0),
        (1.3, 1.0, False, 0.0),
        (1.3, 1.0, True, 1 / 1.3),
        (1.5, 1.0, True, 0.0),
        # A < 0: r as usual, no gradient below 1 − ε, capped at 3
        (0.7, -2.0, False, 0.0),
        (0.7, -2.0, True, 0.7),
        (0.5, -2.0, True, 0.0),
        (1.7, -2.0, False, 1.7),
        (5.0, -2.0, False, 3.0),
    ],
)
def test_aspo_gradient_weights(ratio: float, advantage: float, high_entropy: bool, weight: float) -> None:
    assert archer_gradient_weight(ratio, advantage, high_entropy) == pytest.approx(weight, rel=1e-10)


def test_aspo_weights_are_continuous_in_the_ratio_where_the_cap_begins() -> None:
    ratios = row(1 / 3 - 1e-9, 1 / 3 + 1e-9)
    weights, _, _ = aspo_weights(ratios, row(1, 1), 0.2, 3.0)
    close(weights / 3, 1.0, 1 / (1 + 3e-9))


def test_high_entropy_is_judged_inside_each_response() -> None:
    # Row 0 as above. Row 1: real entropies 10, 20, 30; the quantile 0.8 lies at 10 + 0.8·2·10 = 26.
    entropies = torch.tensor([[0, 1, 2, 3, 4, 5], [10, 20, 30, 99, 99, 99]], dtype=torch.float64)
    mask = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    high = high_entropy_tokens(entropies, mask)
    assert high.nonzero().tolist() == [[0, 5], [1, 2]]


def test_archer_holds_low_entropy_tokens_to_the_reference() -> None:
    # k3 at d = log π − log π_ref = log 2: 1/2 + log 2 − 1. Its gradient is 1 − e^−d = 1/2.
    # KL coefficient 0.1 low, 0 high.
    ref = torch.full((1, 6), -1.5 - math.log(2), dtype=torch.float64)
    ones, zeros = torch.ones(1, 6, dtype=torch.float64), torch.zeros(1, 6, dtype=torch.float64)
    inputs = inputs_at(ones, zeros, entropies=LOW_THEN_HIGH, ref_log_probs=ref)
    outputs = policy_loss("archer", kl_low_entropy=0.1)(inputs)
    kl = 0.5 + math.log(2) - 1
    close(outputs.loss, *[0.1 * kl] * 5, 0)
    close(gradient(outputs, inputs), *[0.05] * 5, 0)
    close(outputs.metrics["actor/kl_loss"], *[kl] * 6)
    close(outputs.metrics["actor/high_entropy_fraction"], 0, 0, 0, 0, 0, 1)


def test_archer_says_what_it_needs() -> None:
    assert policy_loss("archer").needs == {"entropies", "ref_log_probs"}
    assert policy_loss("archer", kl_low_entropy=0.0).needs == {"entropies"}
    with pytest.raises(GradtraceError, match="archer needs entropies"):
        policy_loss("archer")(inputs_at(row(1.0), row(1)))
    with pytest.raises(GradtraceError, match="needs ref_log_probs"):
        policy_loss("archer")(inputs_at(row(1.0), row(1), entropies=row(1.0)))


# The critic -------------------------------------------------------------------------------------------------


def test_value_loss_by_hand() -> None:
    # V_old = 0, clip 0.2, target 1. V = 0.1: ½·0.9². V = 0.5, beyond the clip: near value 0.2, ½·0.8² and no
    # gradient. V = −0.5, gone the wrong way: ½·1.5² with its full gradient V − R.
    values = row(0.1, 0.5, -0.5).requires_grad_()
    mask = torch.ones(1, 3, dtype=torch.bool)
    outputs = value_loss(values, row(0, 0, 0), row(1, 1, 1), mask, clip=0.2)
    close(outputs.loss, 0.405, 0.32, 1.125)
    close(torch.autograd.grad(outputs.loss.sum(), values)[0], -0.9, 0, -1.5)
    close(outputs.metrics["critic/vf_clipfrac"], 0, 1, 0)
    close(value_loss(values, row(0, 0, 0), row(1, 1, 1), mask, clip=None).loss, 0.405, 0.125, 1.125)


# Properties of all of them ----------------------------------------------------------------------------------


def random_batch(seed: int, rows: int = 7, length: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(rows, length, dtype=torch.float64, generator=generator)

    lengths = torch.randint(0, length + 1, (rows, 1), generator=generator)
    old = -normal().abs()
    return {
        "log_probs": old + 0.4 * normal(),
        "old_log_probs": old,
        "advantages": normal(),
        "mask": torch.arange(length) < lengths,
        "ref_log_probs": old + 0.4 * normal(),
        "entropies": normal().abs(),
    }


def run(name: str, batch: dict[str, Tensor], mode: str, denominator: Denominator) -> tuple[Tensor, Tensor, dict]:
    """Loss, gradient by log_probs and metric sums of one micro-batch."""
    log_probs = batch["log_probs"].clone().requires_grad_()
    outputs = policy_loss(name)(LossInputs(**{**batch, "log_probs": log_probs}))
    loss = aggregate(outputs.loss, batch["mask"], mode, denominator)
    return loss.detach(), torch.autograd.grad(loss, log_probs)[0], outputs.metric_sums()


@pytest.mark.parametrize("name", policy_loss_names())
@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean", "fixed_length"])
@pytest.mark.parametrize("seed", range(4))
def test_micro_batch_split_does_not_change_loss_gradient_or_metrics(name: str, mode: str, seed: int) -> None:
    batch = random_batch(seed)
    denominator = Denominator.of(batch["mask"], max_length=8)
    loss, grad, metrics = run(name, batch, mode, denominator)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
    for sizes in ([7], [3, 4], [1, 2, 2, 2], [1] * 7):
        pieces = order.split(sizes)
        parts = [run(name, {k: v[rows] for k, v in batch.items()}, mode, denominator) for rows in pieces]
        torch.testing.assert_close(torch.stack([p[0] for p in parts]).sum(), loss, rtol=1e-12, atol=1e-14)
        split_grad = torch.empty_like(grad)
        split_grad[order] = torch.cat([p[1] for p in parts])
        torch.testing.assert_close(split_grad, grad, rtol=1e-12, atol=1e-14)
        for metric, total in metrics.items():
            torch.testing.assert_close(sum(p[2][metric] for p in parts), total, msg=metric)


@pytest.mark.parametrize("name", policy_loss_names())
@pytest.mark.parametrize("junk", [math.nan, math.inf, -1e30])
def test_padding_never_matters_to_loss_gradient_or_metrics(name: str, junk: float) -> None:
    batch = random_batch(11)
    mask = batch["mask"]
    spoilt = {k: v if k == "mask" else v.masked_fill(~mask, junk) for k, v in batch.items()}
    denominator = Denominator.of(mask)
    loss, grad, metrics = run(name, batch, "token_mean", denominator)
    loss_spoilt, grad_spoilt, metrics_spoilt = run(name, spoilt, "token_mean", denominator)
    assert torch.equal(loss, loss_spoilt)
    assert torch.equal(grad, grad_spoilt)
    assert (grad_spoilt[~mask] == 0).all()
    assert metrics == metrics_spoilt
    outputs = policy_loss(name)(LossInputs(**spoilt))
    for values in (outputs.loss, *outputs.metrics.values()):
        assert (values[~mask] == 0).all()


@pytest.mark.parametrize("name", policy_loss_names())
def test_gradient_reaches_the_policy_only(name: str) -> None:
    batch = random_batch(5)
    columns = {k: v if k == "mask" else v.clone().requires_grad_() for k, v in batch.items()}
    policy_loss(name)(LossInputs(**columns)).loss.sum().backward()
    assert columns["log_probs"].grad is not None
    for column in ("old_log_probs", "advantages", "ref_log_probs"):
        assert columns[column].grad is None, column


@pytest.mark.parametrize("name", policy_loss_names())
def test_extreme_ratios_stay_finite_in_float32(name: str) -> None:
    log_probs = torch.tensor([[0.0, -200.0, 0.0, -200.0]], requires_grad=True)
    old = torch.tensor([[-200.0, 0.0, -200.0, 0.0]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    inputs = LossInputs(log_probs, old, torch.tensor([[1.0, 1.0, -1.0, -1.0]]), mask, old, torch.rand(1, 4))
    outputs = policy_loss(name)(inputs)
    outputs.loss.sum().backward()
    assert torch.isfinite(outputs.loss).all()
    assert torch.isfinite(log_probs.grad).all()


def test_columns_of_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"advantages is \(1, 2\), the mask is \(1, 3\)"):
        LossInputs(row(1, 2, 3), row(1, 2, 3), row(1, 2), torch.ones(1, 3, dtype=torch.bool))
