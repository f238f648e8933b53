"""The yardstick itself: real steps leave nothing behind, and influence agrees with them, in sign and in size."""

from __future__ import annotations

import copy
import math
from functools import cache

import pytest
import torch

from gradtrace.algorithms import policy_loss
from gradtrace.attribution import InfluenceConfig
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.verify.measure import (
    QUESTIONS,
    Effects,
    Size,
    Statistic,
    answers,
    interval,
    jackknife,
    pearson,
    planned,
    pooled,
    random_halves,
    ranks,
    single_responses,
    single_tokens,
    slope,
    spearman,
)
from gradtrace.instruments.verify.trial import BASELINE, RealSteps, Scores, Trial, in_precision
from gradtrace.intervals import mean_interval, paired_difference
from tests.attribution.models import random_responses, tiny_model


def batch_of(groups: int = 3, n: int = 4, seed: int = 3) -> RolloutBatch:
    drawn = random_responses(groups=groups, n=n, seed=seed, longest=8)
    cut = list(zip(drawn.sequences, drawn.prompt_lengths, strict=True))
    own = [ids[length:] for ids, length in cut]
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(ids), dtype=torch.bool) for ids in own], batch_first=True)
    rewards = drawn.accepted.double()
    means = torch.stack([rewards[drawn.group == g].mean() for g in drawn.group])
    return RolloutBatch(
        prompts=[cut[n * g][0][: cut[n * g][1]].tolist() for g in range(groups)],
        group=drawn.group,
        responses=torch.nn.utils.rnn.pad_sequence(own, batch_first=True),
        response_mask=mask,
        finished=torch.ones(len(own), dtype=torch.bool),
        sampler_log_probs=torch.zeros(mask.shape),
        rewards=rewards,
        advantages=(rewards - means)[:, None] * mask,
    )


@cache
def trained(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A tiny model after twenty steps on other batches."""
    model = tiny_model("llama")
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=2e-3, momentum=0.9, weight_decay=0.01)
    if kind == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    for seed in range(20):
        trial = Trial(model, optimizer, batch_of(seed=seed))
        for name, p in model.named_parameters():
            p.grad = trial.gradient[name]
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def trial_of(
    dtype: torch.dtype = torch.float64, kind: str = "adamw", grad_clip: float = 0.0, clips: bool = False
) -> Trial:
    """The mini-batch that comes after `trained`, in this precision."""
    model, optimizer = copy.deepcopy(trained(kind))
    model.to(dtype)
    for parameter, kept in optimizer.state.items():
        kept |= {key: in_precision(value, parameter) for key, value in kept.items()}
    loss = {"loss": policy_loss("ppo", clip_low=0.2, clip_high=0.28)} if clips else {}
    return Trial(model, optimizer, batch_of(seed=99), grad_clip=grad_clip, **loss)


@cache
def measured(kind: str = "adamw") -> tuple[Trial, list[Effects]]:
    """Every token of three groups, its weight in the real step changed by half of itself, in float64."""
    trial = trial_of(kind=kind)
    return trial, [one.take_all(trial) for one in planned(trial, Size(tokens=0, halves=0), seed=0)]


def agreement(scores: Scores, statistic: Statistic, own: bool = False, kind: str = "adamw") -> list[float]:
    pairs = [one.pairs(scores, own) for one in measured(kind)[1]]
    return [statistic(*pair) for pair in pairs] if own else [pooled(pairs, statistic)]


@pytest.mark.parametrize("kind", ["adamw", "momentum"])
def test_influence_in_float32_predicts_real_steps_in_float64(kind: str) -> None:
    """As the product computes it: rank, sign and, where a step is linear in the gradient, size in nats."""
    scores = trial_of(torch.float32, kind).influence()
    assert agreement(scores, spearman, kind=kind)[0] > 0.95 and agreement(scores, pearson, kind=kind)[0] > 0.99
    # In Adam's division a token weighs twice: what more weight brings is less than its part of the step.
    assert 0.95 < agreement(scores, slope, kind=kind)[0] < (1.05 if kind == "momentum" else 1.6)
    free = measured(kind)[0].baselines()[BASELINE]
    assert agreement(free, spearman, kind=kind)[0] < 0.8


def test_influence_on_the_own_prompt_predicts_what_a_token_does_to_its_own_group() -> None:
    trial = trial_of(torch.float32)
    own, whole = trial.influence_own(list(trial.members)), trial.influence()
    assert min(agreement(own, spearman, own=True)) > 0.9 and min(agreement(own, pearson, own=True)) > 0.98
    assert all(0.95 < value < 1.6 for value in agreement(own, slope, own=True))
    # Two questions: what is right for one is worse for the other.
    assert sum(agreement(whole, pearson, own=True)) < sum(agreement(own, pearson, own=True))
    assert agreement(own, pearson) < agreement(whole, pearson)


@pytest.mark.parametrize("wrong", ["sign", "normaliser", "off by one"])
def test_scores_with_a_wrong_sign_normaliser_or_mask_do_not_pass(wrong: str) -> None:
    right = trial_of(torch.float32, "momentum").influence()
    turned = {
        "sign": lambda values: -values,
        "normaliser": lambda values: values * sum(map(len, right.values())),
        "off by one": lambda values: values.roll(1),
    }[wrong]
    for made, is_right in ((lambda values: values, True), (turned, False)):
        scores = {r: made(values) for r, values in right.items()}
        found = [agreement(scores, statistic, kind="momentum")[0] for statistic in (spearman, slope)]
        assert (found[0] > 0.95 and 0.95 < found[1] < 1.05) is is_right, found


@pytest.mark.parametrize("clips", [False, True])
def test_the_books_balance(clips: bool) -> None:
    """Sums of influence over groups are what the step did to the groups, without momentum and weight decay."""
    options = {"grad_clip": 0.05, "clips": clips}
    scores, trial = trial_of(torch.float32, **options).influence(), trial_of(**options)
    done = {g: torch.stack([trial.done[r].sum() for r in rows]).sum() for g, rows in trial.members.items()}
    sums = {g: torch.stack([scores[r].sum() for r in rows]).sum() for g, rows in trial.members.items()}
    said, did = (torch.stack(list(values.values())) for values in (sums, done))
    assert pearson(said, did) > 0.99 and 0.9 < slope(said, did) < 1.1


def test_a_real_step_leaves_nothing_behind() -> None:
    trial = trial_of()
    weights = [p.detach().clone() for p in trial.model.parameters()]
    kept = [v.clone() for p in trial.model.parameters() for v in trial.optimizer.state[p].values()]
    steps = RealSteps(trial.model, trial.optimizer)
    moved = steps.effect({}, lambda: next(trial.model.parameters()).detach().clone())
    assert not torch.equal(moved, weights[0])  # momentum and decay
    trial.effect({0: torch.ones(trial.counts[0], dtype=torch.bool)})
    trial.influence_own([0])
    trial.factors(InfluenceConfig(hessian_mode="identity", pairwise=False))
    assert all(torch.equal(a, b) for a, b in zip(weights, trial.model.parameters(), strict=True))
    after = [v for p in trial.model.parameters() for v in trial.optimizer.state[p].values()]
    assert all(torch.equal(a, b) for a, b in zip(kept, after, strict=True))
    assert all(p.grad is None for p in trial.model.parameters())


def test_a_state_that_was_empty_is_empty_again() -> None:
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters())
    RealSteps(model, optimizer).effect({}, lambda: torch.zeros(()))
    assert not optimizer.state


def test_momentum_and_decay_do_nothing_to_an_effect_of_sgd() -> None:
    """Steps that are linear in the gradient differ by the token's own, whatever else moves the weights."""
    found = []
    for options in ({}, {"weight_decay": 0.0}):
        model = tiny_model("llama")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, **options)
        trial = Trial(model, optimizer, batch_of())
        found.append(single_tokens(trial, 0, 4, torch.Generator().manual_seed(0)).take_all(trial).measured)
    assert found[0] == found[1] and any(value for value, _ in found[0])


def test_groups_parts_of_an_effect_add_up_and_groups_without_advantage_have_none() -> None:
    trial = trial_of()
    assert trial.batch.advantages is not None
    batch = trial.batch.replace(advantages=trial.batch.advantages * (trial.batch.group != 1)[:, None])
    trial = Trial(trial.model, trial.optimizer, batch)
    assert list(trial.members) == [0, 2] and set(trial.rows) == set((batch.group != 1).nonzero().squeeze(-1).tolist())
    (effects,) = (single_responses(trial, 2).take_all(trial),)
    changes = trial.effect(effects.chosen[0])
    assert effects.measured[0] == [pytest.approx(float(changes.sum())), pytest.approx(float(changes[1]))]


def test_halves_and_responses_are_predicted_by_sums() -> None:
    trial = trial_of(kind="momentum")
    scores, generator = trial.influence(), torch.Generator().manual_seed(0)
    for effects in (single_responses(trial, 0), random_halves(trial, 0, 8, generator)):
        assert slope(*effects.take_all(trial).pairs(scores)) == pytest.approx(1.0, abs=0.15)


def test_scores_that_are_missing_are_passed_over() -> None:
    trial, effects = measured()
    scores = {r: values.clone() for r, values in trial.influence().items() if r not in trial.members[0]}
    first = trial.members[1][0]
    scores[first][0] = math.nan
    pairs = [one.pairs(scores) for one in effects]
    assert [len(said) for said, _ in pairs] == [0, len(effects[1].measured) - 1, len(effects[2].measured)]
    values = answers(effects, scores, QUESTIONS["token_own"])
    assert math.isnan(values[0]) and not math.isnan(values[1])


def test_ranks_of_ties_and_correlations() -> None:
    assert ranks(torch.tensor([3.0, 1.0, 3.0, 2.0])).tolist() == [2.5, 0.0, 2.5, 1.0]
    up = torch.arange(5.0)
    assert spearman(up, up.exp()) == pytest.approx(1.0) and spearman(up, -up) == pytest.approx(-1.0)
    assert pearson(up, 3 * up + 1) == pytest.approx(1.0) and slope(3 * up, up) == pytest.approx(3.0)
    assert math.isnan(spearman(up, torch.ones(5)))


def test_the_jackknife_of_a_mean_is_the_usual_interval() -> None:
    """Of means of groups of one size it is Student's t over the groups' means."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    groups = [(own, own) for own in values]
    found = mean_interval(jackknife(groups, lambda said, _: float(said.mean())))
    expected = mean_interval(values.mean(1).tolist())
    assert (found.mean, found.low, found.high) == pytest.approx((expected.mean, expected.low, expected.high))


def test_intervals_are_paired_and_pass_over_what_is_undefined() -> None:
    first, second = [0.9, 0.5, math.nan, 0.7], [0.8, 0.4, 0.1, 0.6]
    assert interval(first).count == 3 and interval(first).low < interval(first).mean < interval(first).high
    gain = paired_difference(first, second)
    assert gain.mean == pytest.approx(0.1) and gain.low == pytest.approx(0.1)
    assert math.isnan(interval([math.nan]).mean)
