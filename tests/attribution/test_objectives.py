"""Objectives: their weights, and when the training backward is already the objective."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradtrace.attribution import (
    AttributionError,
    InfluenceTracer,
    TrainingPass,
    needs_own_backward,
    objective,
    objective_sign,
    objective_weights,
    step_scale,
)
from tests.attribution.models import random_responses, tiny_model, token_log_probs
from tests.attribution.scoring import assert_close, exact_config

MASK = torch.tensor([[True, True, False], [True, True, True]])


def test_training_loss_never_needs_a_pass_of_its_own() -> None:
    assert not needs_own_backward("training_loss", TrainingPass(on_policy=False, kl_in_loss=True))


@pytest.mark.parametrize(
    "training, own",
    [
        (TrainingPass(on_policy=True), False),
        (TrainingPass(on_policy=False), True),
        (TrainingPass(on_policy=True, kl_in_loss=True), True),
        (TrainingPass(on_policy=True, entropy_bonus=True), True),
        (TrainingPass(on_policy=True, constant_denominator=False), True),
        (TrainingPass(on_policy=True, policy_gradient_at_ratio_one=False), True),
    ],
)
def test_advantage_objective_rides_on_the_training_pass_only_when_proportional(
    training: TrainingPass, own: bool
) -> None:
    assert needs_own_backward("log_prob_advantage", training) is own
    for name in ("log_prob", "log_prob_reward"):
        assert needs_own_backward(name, training)  # advantages may differ within a response, or be 0
        assert needs_own_backward(name, replace(training, one_advantage_per_response=True)) is own


def test_weights_are_literal() -> None:
    assert torch.equal(objective_weights("log_prob", MASK), MASK.float())
    advantages = torch.tensor([2.0, -1.0])
    expected = torch.tensor([[2.0, 2.0, 0.0], [-1.0, -1.0, -1.0]])
    assert torch.equal(objective_weights("log_prob_advantage", MASK, advantages=advantages), expected)
    per_token = objective_weights("log_prob_advantage", MASK, advantages=expected + (~MASK) * 7)
    assert torch.equal(per_token, expected)
    with pytest.warns(UserWarning, match="1 of 2 responses have reward 0"):
        weights = objective_weights("log_prob_reward", MASK, rewards=torch.tensor([0.0, 1.0]))
    assert torch.equal(weights, torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]))


@pytest.mark.parametrize("name", ["log_prob_advantage", "log_prob_reward", "training_loss"])
def test_missing_inputs_are_named(name: str) -> None:
    with pytest.raises(AttributionError, match=name):
        objective_weights(name, MASK)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["log_prob_advantage", "log_prob", "log_prob_reward"])
def test_riding_on_the_training_pass_gives_the_scores_of_the_objective(name: str) -> None:
    """On policy, PPO's clipped loss is −Σ A ℓ / N: scaled, its gradients are those of every objective."""
    model, batch = tiny_model(), random_responses()
    rows = list(range(len(batch)))
    ids, attention, tokens, _ = batch.padded(rows)
    rewards = batch.accepted.double() + 0.5
    per_token = batch.advantages[:, None].expand(ids.shape)

    def scores(rides: bool) -> list[torch.Tensor]:
        with InfluenceTracer(model, config=exact_config()) as tracer:
            log_probs = token_log_probs(model(input_ids=ids, attention_mask=attention).logits, ids)
            scale = torch.ones(len(batch), dtype=torch.float64)
            if rides:
                count = float(tokens.sum())
                ratio = (log_probs - log_probs.detach()).exp()
                clipped = torch.minimum(ratio * per_token, ratio.clamp(0.8, 1.28) * per_token)
                loss = -(clipped * tokens).sum() / count
                scale = step_scale(name, torch.full_like(scale, 1 / count), batch.advantages, rewards)
            else:
                loss = objective(log_probs, objective_weights(name, tokens, per_token, rewards).double())
            sign = objective_sign(name, batch.advantages, rewards).double()
            with tracer.capture(response=torch.tensor(rows), tokens=tokens, scale=scale):
                loss.backward()
            return tracer.score(accepted=batch.accepted, group=batch.group, sign=sign).token_scores

    assert_close(scores(rides=True), scores(rides=False), tolerance=1e-6)


def test_the_sign_of_an_objective_is_that_of_its_weight() -> None:
    advantages, rewards = torch.tensor([0.5, -0.5, 0.0]), torch.tensor([1.0, 0.0, -1.0])
    assert objective_sign("training_loss", advantages, rewards).tolist() == [1, -1, 1]
    assert objective_sign("log_prob_advantage", advantages, rewards).tolist() == [1, -1, 1]
    assert objective_sign("log_prob_reward", advantages, rewards).tolist() == [1, 1, -1]
    assert objective_sign("log_prob", advantages, rewards).tolist() == [1, 1, 1]
