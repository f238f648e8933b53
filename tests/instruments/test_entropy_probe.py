"""The entropy probe: the update is the optimizer's, the prediction is the derivative, the parts are the whole."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradtrace.algorithms.logits import log_probs_and_entropies
from gradtrace.algorithms.settings import AlgorithmConfig
from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.instruments.entropy_probe.estimates import (
    Prediction,
    Tokens,
    _predicted,
    _predicted_columns,
    jackknife,
)
from gradtrace.instruments.entropy_probe.passes import Pass, TokenBatch, evaluation_batch, precise, update_batch
from gradtrace.instruments.entropy_probe.probe import EntropyProbe
from gradtrace.policy.loss import PolicyLoss, fill_statistics
from gradtrace.policy.microbatch import MicroBatches
from gradtrace.policy.policy import Policy
from gradtrace.rollout import Sampler, SamplingParams
from tests.training import small

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1),
    "adamw_fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.3, fused=True),
    "adamw_amsgrad": lambda groups: torch.optim.AdamW(groups, lr=1e-2, amsgrad=True),
    "adam_l2": lambda groups: torch.optim.Adam(groups, lr=1e-2, weight_decay=0.1, eps=1e-3),
    "adamw_maximize": lambda groups: torch.optim.AdamW(groups, lr=1e-2, maximize=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, weight_decay=0.1),
    "sgd_momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "sgd_nesterov": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
}


def optimizer_of(policy: Policy, kind: str = "adamw") -> torch.optim.Optimizer:
    """As in training: no decay for vectors."""
    parameters = list(policy.model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2]},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return OPTIMIZERS[kind](groups)


def sampled(policy: Policy, prompts: int, n: int, seed: int) -> RolloutBatch:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, 18, (4,), generator=generator).tolist() for _ in range(prompts)]
    params = SamplingParams(n=n, max_new_tokens=6, stop_token_ids=(1,))
    batch = Sampler(policy.model).generate(ids, params, generator=generator)
    dtype = next(policy.model.parameters()).dtype
    return batch.replace(sampler_log_probs=batch.sampler_log_probs.to(dtype))


def updates(policy: Policy, batch: RolloutBatch, token_budget: int = 16384, **algorithm: Any) -> TokenBatch:
    batch = fill_statistics(policy, batch, MicroBatches(batch, 16384), torch.arange(len(batch)))
    advantages = torch.randn(len(batch), 1, generator=torch.Generator().manual_seed(5)) * batch.response_mask
    batch = batch.replace(advantages=advantages.to(batch.sampler_log_probs))
    update = PolicyLoss(precise(policy), AlgorithmConfig(**algorithm), 6)
    return update_batch(update, batch, token_budget)


def warmed_up(policy: Policy, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    """Real steps, so that the optimizer has a state."""
    for seed in range(steps):
        batch = updates(policy, sampled(policy, 2, 2, 70 + seed))
        real_backward(batch)
        optimizer.step()
        optimizer.zero_grad()


def real_backward(batch: TokenBatch) -> None:
    for one in batch.passes():
        one.run().sum().backward()


class Setting:
    def __init__(self, kind: str = "adamw", clip: float | None = 0.05, model: Any = None, **algorithm: Any) -> None:
        self.policy = small.policy(**(model or {}))
        self.optimizer = optimizer_of(self.policy, kind)
        warmed_up(self.policy, self.optimizer)
        self.evaluation = sampled(self.policy, 12, 1, seed=1)
        self.E = evaluation_batch(self.policy, self.evaluation)
        self.update_rollout = sampled(self.policy, 3, 3, seed=2)
        self.U = updates(self.policy, self.update_rollout, **algorithm)
        self.probe = EntropyProbe(self.policy.model, self.optimizer, clip)


def weights(policy: Policy) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in policy.model.named_parameters()}


# ---------------------------------------------------------------- identity 10: the update is the optimizer's own


@pytest.mark.parametrize("state", ["fresh", "with state"])
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_direction_is_what_one_real_optimizer_step_does(kind: str, state: str) -> None:
    policy = small.policy()
    optimizer = optimizer_of(policy, kind)
    if state == "with state":
        warmed_up(policy, optimizer)
    batch = updates(policy, sampled(policy, 3, 3, seed=2))
    update = EntropyProbe(policy.model, optimizer, max_grad_norm=0.05).update(batch)
    assert update.clip_factor < 1
    before = weights(policy)
    real_backward(batch)
    norm = nn.utils.clip_grad_norm_(policy.model.parameters(), 0.05)
    optimizer.step()
    assert math.isclose(update.grad_norm, float(norm), rel_tol=1e-10)
    assert set(update.direction) == set(before)
    for name, value in weights(policy).items():
        torch.testing.assert_close(update.direction[name], value - before[name], atol=1e-13, rtol=1e-9)


def test_probing_leaves_weights_gradients_state_and_random_numbers_alone() -> None:
    setting = Setting()
    before, state = weights(setting.policy), setting.optimizer.state_dict()
    moments = {k: {n: v.clone() for n, v in s.items()} for k, s in state["state"].items()}
    rng = torch.get_rng_state()
    update = setting.probe.update(setting.U)
    prediction = setting.probe.predict(setting.E, update)
    setting.probe.shares(prediction, setting.E, update, setting.U)
    setting.probe.measure(prediction, setting.E, update, 3.0)
    assert all(torch.equal(value, before[name]) for name, value in weights(setting.policy).items())
    assert all(p.grad is None for p in setting.policy.model.parameters())
    assert torch.equal(rng, torch.get_rng_state())
    for key, values in setting.optimizer.state_dict()["state"].items():
        assert all(torch.equal(values[name], moments[key][name]) for name in values)


# ---------------------------------------------------------------- identity 9: prediction and measurement


@pytest.mark.parametrize("kind", ["adamw", "sgd_momentum"])
def test_small_steps_measure_what_was_predicted(kind: str) -> None:
    setting = Setting(kind)
    update = setting.probe.update(setting.U)
    prediction = setting.probe.predict(setting.E, update)
    assert abs(prediction.change.value) > 1e-6
    scale = 1e-5
    measured, _ = setting.probe.measure(prediction, setting.E, update, scale)
    assert math.isclose(measured.change.value / scale, prediction.change.value, rel_tol=1e-4)
    slopes = []
    for scale in (1e-3, 1e-2):
        measured, _ = setting.probe.measure(prediction, setting.E, update, scale)
        slopes.append(math.log(abs(measured.change.value)))
    assert 0.95 < (slopes[1] - slopes[0]) / math.log(10) < 1.05


def test_no_step_measures_nothing_and_every_sequence_counts() -> None:
    setting = Setting()
    update = setting.probe.update(setting.U)
    prediction = setting.probe.predict(setting.E, update)
    measured, after = setting.probe.measure(prediction, setting.E, update, 0.0)
    assert measured.change.value == 0.0
    assert measured.ess == len(setting.evaluation)
    assert torch.equal(after.entropies, prediction.base.entropies)


def test_prediction_is_the_central_difference_of_the_weighted_mean_entropy() -> None:
    setting = Setting("sgd")
    update = setting.probe.update(setting.U)
    prediction = setting.probe.predict(setting.E, update)
    plus, after = setting.probe.measure(prediction, setting.E, update, 1e-4)
    minus, before = setting.probe.measure(prediction, setting.E, update, -1e-4)
    slope = (plus.change.value - minus.change.value) / 2e-4
    assert math.isclose(slope, prediction.change.value, rel_tol=1e-7)
    per_token = (after.entropies - before.entropies) / 2e-4
    torch.testing.assert_close(per_token, prediction.d_entropies, atol=1e-9, rtol=1e-6)


# ---------------------------------------------------------------- identity 8: a policy whose answer is known


class Tabular(nn.Module):
    """One state, V actions: softmax of a table."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)


def tabular_batch(model: Tabular, actions: Tensor, losses: Tensor | None = None) -> TokenBatch:
    """Sequences of one action; with `losses` [R] as an update batch whose terms are −losses·log π."""

    def run() -> Tensor:
        log_probs, entropies = log_probs_and_entropies(model.logits.expand(len(actions), -1), actions, 1.0)
        return torch.stack([log_probs, entropies]) if losses is None else -losses * log_probs

    rows = torch.arange(len(actions))
    return TokenBatch(torch.ones_like(rows), rows, lambda: [Pass(rows, run)])


def test_tabular_softmax_changes_by_minus_the_covariance_of_log_prob_and_logit_change() -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, dtype=torch.float64)
    model = Tabular(logits.clone())
    advantages = torch.randn(7, dtype=torch.float64)
    rate = 0.3
    probe = EntropyProbe(model, torch.optim.SGD([model.logits], lr=rate))
    actions = torch.arange(7)
    p = logits.softmax(0)
    update = probe.update(tabular_batch(model, actions, p * advantages))  # the exact policy gradient
    step = rate * p * (advantages - p @ advantages)
    torch.testing.assert_close(update.direction["logits"], step)

    log_p = p.log()
    gradient = -p * (log_p + -(p @ log_p))
    covariance = p @ (log_p * step) - (p @ log_p) * (p @ step)
    evaluation = tabular_batch(model, torch.zeros(1, dtype=torch.long))
    prediction = probe.predict(evaluation, update)  # one state: no score-function part
    assert math.isclose(prediction.change.value, float(gradient @ step), rel_tol=1e-12)
    assert math.isclose(prediction.change.value, -float(covariance), rel_tol=1e-12)
    shares = probe.shares(prediction, evaluation, update, tabular_batch(model, actions, p * advantages))
    one_hot = torch.eye(7, dtype=torch.float64)
    each = torch.stack([gradient @ (rate * p[a] * advantages[a] * (one_hot[a] - p)) for a in range(7)])
    torch.testing.assert_close(shares.tokens, each)


# ---------------------------------------------------------------- shares


@pytest.mark.parametrize("kind", ["adamw", "adam_l2", "sgd_nesterov"])
def test_shares_momentum_and_decay_sum_to_the_prediction(kind: str) -> None:
    setting = Setting(kind, entropy_coef=0.1)
    update = setting.probe.update(setting.U)
    prediction = setting.probe.predict(setting.E, update)
    shares = setting.probe.shares(prediction, setting.E, update, setting.U)
    whole = prediction.change.value
    assert math.isclose(shares.legacy, whole, rel_tol=1e-9)
    parts = float(shares.tokens.sum()) + shares.momentum + shares.decay
    assert math.isclose(parts, whole, rel_tol=1e-9)
    assert math.isclose(float(shares.responses.sum()), float(shares.tokens.sum()), rel_tol=1e-12)
    assert shares.momentum != 0 and (shares.decay != 0) == (kind != "sgd_nesterov")


def test_parts_sum_to_the_whole_where_responses_hold_the_padding_token() -> None:
    """Autograd leaves the padding row of the embedding out, and so does the optimizer; the model does not."""
    setting = Setting(model={"pad_token_id": 8})
    assert bool((setting.update_rollout.responses[:, :-1] == 8).any())
    assert bool((setting.evaluation.responses[:, :-1] == 8).any())
    update = setting.probe.update(setting.U)
    prediction = setting.probe.predict(setting.E, update)
    shares = setting.probe.shares(prediction, setting.E, update, setting.U)
    assert math.isclose(shares.legacy, prediction.change.value, rel_tol=1e-9)
    parts = float(shares.tokens.sum()) + shares.momentum + shares.decay
    assert math.isclose(parts, prediction.change.value, rel_tol=1e-9)
    measured, _ = setting.probe.measure(prediction, setting.E, update, 1e-5)
    assert math.isclose(measured.change.value * 1e5, prediction.change.value, rel_tol=1e-4)


def test_share_of_a_response_is_the_product_of_its_own_gradient() -> None:
    """By a backward pass for every response, as nobody should have to do it."""
    setting = Setting()
    update = setting.probe.update(setting.U)
    prediction = setting.probe.predict(setting.E, update)
    shares = setting.probe.shares(prediction, setting.E, update, setting.U)
    target = setting.probe._entropy_gradient(prediction.base, setting.E, None)
    adam = setting.optimizer.param_groups[0]
    parameters = dict(setting.policy.model.named_parameters())
    terms = setting.U.collect(lambda one: one.run())
    lengths = setting.U.lengths.tolist()
    for response in range(len(lengths)):
        start, stop = sum(lengths[:response]), sum(lengths[: response + 1])
        (one,) = setting.U.passes()
        loss = one.run()  # one pass holds all rows, but in an order of its own
        places = torch.isin(loss.detach(), terms[start:stop])
        own = torch.autograd.grad(loss[places].sum(), list(parameters.values()))
        product = 0.0
        for (name, parameter), gradient in zip(parameters.items(), own, strict=True):
            state = setting.optimizer.state[parameter]
            step = float(state["step"]) + 1
            square = 0.9 * state["exp_avg_sq"] + 0.1 * update.gradient[name] ** 2
            denominator = (square / (1 - 0.9**step)).sqrt() + adam["eps"]
            factor = adam["lr"] * (1 - 0.8) / (1 - 0.8**step) / denominator
            product -= float((target[name] * factor * update.clip_factor * gradient).sum())
        assert math.isclose(float(shares.responses[response]), product, rel_tol=1e-8)


# ---------------------------------------------------------------- invariance


def test_numbers_do_not_depend_on_the_micro_batches() -> None:
    setting = Setting()
    results = []
    for budget in (16384, 25):
        E = evaluation_batch(setting.policy, setting.evaluation, budget)
        U = updates(setting.policy, setting.update_rollout, budget)
        assert len(list(E.passes())) == (1 if budget == 16384 else 6)
        update = setting.probe.update(U)
        prediction = setting.probe.predict(E, update)
        shares = setting.probe.shares(prediction, E, update, U)
        measured, after = setting.probe.measure(prediction, E, update, 1.0)
        results.append(
            torch.cat(
                [
                    prediction.d_entropies,
                    shares.tokens,
                    after.entropies,
                    torch.tensor(
                        [prediction.change.value, prediction.change.stderr, measured.ess]
                        + [measured.change.value, measured.difference.stderr]
                    ),
                ]
            )
        )
    torch.testing.assert_close(results[0], results[1], atol=1e-12, rtol=1e-9)


# ---------------------------------------------------------------- standard errors


def test_standard_error_of_a_mean_is_the_textbook_one() -> None:
    values = torch.randn(40, dtype=torch.float64)
    found = jackknife({"x": values, "n": torch.ones(40)}, torch.arange(40), lambda s: s["x"] / s["n"])
    assert math.isclose(found.stderr, float(values.std() / math.sqrt(40)), rel_tol=1e-12)


def test_copies_of_a_response_under_one_prompt_do_not_make_the_error_smaller() -> None:
    values = torch.randn(20, dtype=torch.float64).repeat_interleave(4)
    prompts = torch.arange(20).repeat_interleave(4)
    columns = {"x": values, "n": torch.ones(80)}
    together = jackknife(columns, prompts, lambda s: s["x"] / s["n"])
    alone = jackknife({"x": values[::4], "n": torch.ones(20)}, torch.arange(20), lambda s: s["x"] / s["n"])
    assert math.isclose(together.stderr, alone.stderr, rel_tol=1e-12)


@pytest.mark.parametrize(("prompts", "n"), [(8, 1), (6, 3)])
def test_95_percent_intervals_hold_the_truth_95_times_in_100(prompts: int, n: int) -> None:
    """Of 120 independent small E of a real model: 1.96 standard errors would do so about 90 times in 100 only."""
    setting = Setting()
    E = evaluation_batch(setting.policy, sampled(setting.policy, 120 * prompts, n, seed=3))
    prediction = setting.probe.predict(E, setting.probe.update(setting.U))
    columns = _predicted_columns(prediction.base, prediction.d_log_probs, prediction.d_entropies)
    truth = float(_predicted({name: values.sum() for name, values in columns.items()}))
    estimates = []
    for chosen in prediction.base.group.unique().split(prompts):
        own = torch.isin(prediction.base.group, chosen)
        part = {name: values[own] for name, values in columns.items()}
        estimates.append(jackknife(part, prediction.base.group[own], _predicted))
    assert len(estimates) == 120 and estimates[0].prompts == prompts
    covered = sum(abs(one.value - truth) <= one.half for one in estimates) / 120
    assert 0.9 <= covered <= 0.995
    short = sum(abs(one.value - truth) <= 1.96 * one.stderr for one in estimates) / 120
    assert short < covered


def test_all_three_predictions_agree_in_expectation() -> None:
    """Two tokens after one another, every sequence once with its probability as multiplicity: no noise is left."""
    torch.manual_seed(0)
    first = torch.tensor([0.25, 0.75], dtype=torch.float64)
    second = torch.tensor([[0.5, 0.5], [0.25, 0.75]], dtype=torch.float64)
    d_first = torch.tensor([0.3, -0.1], dtype=torch.float64)  # derivatives of log-probs: E[d log p] = 0
    d_second = torch.tensor([[0.2, -0.2], [0.6, -0.2]], dtype=torch.float64)

    def entropy(p: Tensor) -> Tensor:
        return -(p * p.log()).sum()

    def d_entropy(p: Tensor, d: Tensor) -> Tensor:
        return -(p * d * p.log()).sum()

    log_probs, entropies, d_log, d_ent = [], [], [], []
    for a in range(2):
        for b in range(2):
            for _ in range(round(float(first[a] * second[a, b]) * 16)):
                log_probs += [first[a].log(), second[a, b].log()]
                entropies += [entropy(first), entropy(second[a])]
                d_log += [d_first[a], d_second[a, b]]
                d_ent += [d_entropy(first, d_first), d_entropy(second[a], d_second[a])]
    stack = [torch.stack(values) for values in (log_probs, entropies, d_log, d_ent)]
    base = Tokens(torch.full((16,), 2), torch.arange(16), stack[0], stack[1])
    prediction = Prediction(base, stack[2], stack[3])
    exact = d_entropy(first, d_first) + sum(
        first[a] * (d_first[a] * entropy(second[a]) + d_entropy(second[a], d_second[a])) for a in range(2)
    )
    for estimate in (prediction.change, prediction.reward_to_go, prediction.score_function):
        assert math.isclose(estimate.value, float(exact) / 2, rel_tol=1e-12)


# ---------------------------------------------------------------- bad input


def test_frozen_model_is_refused() -> None:
    policy = small.policy()
    optimizer = optimizer_of(policy)
    policy.model.requires_grad_(False)
    with pytest.raises(GradtraceError, match="every parameter of the model is frozen"):
        EntropyProbe(policy.model, optimizer)


def test_bf16_model_is_refused() -> None:
    policy = small.policy(torch.bfloat16)
    with pytest.raises(GradtraceError, match=r"embed_tokens.weight is torch.bfloat16.*float32 or float64"):
        EntropyProbe(policy.model, optimizer_of(policy))


def test_unknown_optimizer_is_refused() -> None:
    policy = small.policy()
    probe = EntropyProbe(policy.model, torch.optim.Rprop(policy.model.parameters()))
    with pytest.raises(GradtraceError, match="the step of Rprop is not known"):
        probe.update(updates(policy, sampled(policy, 2, 2, 0)))


def test_optimizer_of_another_model_is_refused() -> None:
    policy = small.policy()
    probe = EntropyProbe(policy.model, optimizer_of(small.policy(seed=1)))
    with pytest.raises(GradtraceError, match="made for another model"):
        probe.update(updates(policy, sampled(policy, 2, 2, 0)))


def test_empty_responses_are_refused() -> None:
    policy = small.policy()
    batch = sampled(policy, 3, 1, seed=0)
    batch.response_mask[1] = False
    with pytest.raises(GradtraceError, match="sequence 1 of the batch has no tokens"):
        evaluation_batch(policy, batch)


def test_loss_that_does_not_reach_the_model_is_refused() -> None:
    policy = small.policy()
    rows = torch.arange(1)

    def passes() -> Iterator[Pass]:
        yield Pass(rows, lambda: torch.zeros(1))

    probe = EntropyProbe(policy.model, optimizer_of(policy))
    with pytest.raises(GradtraceError, match="does not depend on any trainable parameter"):
        probe.update(TokenBatch(torch.ones_like(rows), rows, passes))
