"""Objectives: their weights, and when the training backward is already the objective."""

from __future__ import annotations

import pytest
import torch

from gradtrace.attribution import (
    AttributionError,
    InfluenceTracer,
    TrainingPass,
    needs_own_backward,
    objective,
    objective_weights,
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
    assert needs_own_backward("log_prob", training) and needs_own_backward("log_prob_reward", training)


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


def test_riding_on_the_training_pass_gives_the_scores_of_the_objective() -> None:
    """On policy, PPO's clipped loss with a token mean is −F/N for F = Σ A ℓ: scale N gives the same scores."""
    model, batch = tiny_model(), random_responses()
    rows = list(range(len(batch)))
    ids, attention, tokens, _ = batch.padded(rows)
    advantages = batch.advantages[:, None].expand(ids.shape)

    def scores(ppo: bool) -> list[torch.Tensor]:
        with InfluenceTracer(model, exact_config()) as tracer:
            log_probs = token_log_probs(model(input_ids=ids, attention_mask=attention).logits, ids)
            count = float(tokens.sum())
            if ppo:
                ratio = (log_probs - log_probs.detach()).exp()
                clipped = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
                loss, scale = -(clipped * tokens).sum() / count, count
            else:
                loss, scale = (
                    objective(log_probs, objective_weights("log_prob_advantage", tokens, advantages)),
                    1.0,
                )
            with tracer.capture(response=torch.tensor(rows), tokens=tokens, scale=scale):
                loss.backward()
            return tracer.score(accepted=batch.accepted, group=batch.group).token_scores

    assert not needs_own_backward("log_prob_advantage", TrainingPass(on_policy=True))
    assert_close(scores(ppo=True), scores(ppo=False))
