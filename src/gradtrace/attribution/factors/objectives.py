"""Objectives F = Σ_r Σ_t w_t ℓ_t: which weights, and whether the training backward already is that objective."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from gradtrace.attribution.errors import AttributionError


@dataclass(frozen=True)
class TrainingPass:
    """What is true of the backward pass that training is about to do."""

    on_policy: bool = False
    """Every ratio is 1: no optimizer step since the old log-probs were taken."""
    policy_gradient_at_ratio_one: bool = True
    """At ratio 1 the loss has the gradient −A ∇ℓ for every token, up to one common factor."""
    kl_in_loss: bool = False
    entropy_bonus: bool = False
    constant_denominator: bool = True
    """All tokens of a response are divided by the same number, which `scale` of the capture undoes."""
    one_advantage_per_response: bool = False
    """All tokens of a response have the same advantage, and it is not 0: dividing by it is possible."""

    @property
    def proportional_to_advantage(self) -> bool:
        return (
            self.on_policy
            and self.policy_gradient_at_ratio_one
            and self.constant_denominator
            and not self.kl_in_loss
            and not self.entropy_bonus
        )


@dataclass(frozen=True)
class Passes:
    """On which backward passes the hooks ride."""

    step_rides: bool
    """On the training pass; else the step's objective has a pass of its own (`objective_weights`)."""
    target_rides: bool
    """On the pass of the step, with `target_scale`; else Σ ℓ_t has a pass of its own (role="target")."""


def plan_passes(output_function: str, target: str, training: TrainingPass) -> Passes:
    """The passes that step and target need."""
    rides = not needs_own_backward(output_function, training)
    if target == "output_function" or output_function == "log_prob":
        return Passes(rides, True)
    if rides:
        return Passes(True, training.proportional_to_advantage and training.one_advantage_per_response)
    # A·ℓ or R·ℓ in a pass of its own: each response's gradient is a known multiple of that of its log-probs, or zero.
    return Passes(False, output_function == "log_prob_advantage" and training.one_advantage_per_response)


def step_scale(output_function: str, token_weight: Tensor, advantages: Tensor, rewards: Tensor) -> Tensor:
    """[R]: what turns the gradient of the training loss, where the step rides on it, into the one that the step
    follows uphill, without the normaliser of the loss. `token_weight` [R]: what aggregation multiplied each
    response's tokens by.
    """
    if output_function in ("training_loss", "log_prob_advantage"):
        return -1.0 / token_weight
    return -(rewards if output_function == "log_prob_reward" else 1.0) / (token_weight * advantages)


def target_scale(token_weight: Tensor | float, advantages: Tensor, rides: bool = True) -> Tensor:
    """[R]: what turns the gradient of the pass of the step, where the target rides on it, into that of the responses'
    log-probs: of the training loss, or (`rides` is False) of Σ A ℓ in a pass of its own."""
    return (-1.0 / (token_weight * advantages)) if rides else 1.0 / advantages


def needs_own_backward(output_function: str, training: TrainingPass) -> bool:
    """False when the hooks can ride on the training backward: response by response it is proportional to this
    objective, by a factor that `scale` of the capture makes good (see `step_scale`)."""
    if output_function == "training_loss":
        return False
    if output_function == "log_prob_advantage":
        return not training.proportional_to_advantage
    return not (training.proportional_to_advantage and training.one_advantage_per_response)


def objective_sign(output_function: str, advantages: Tensor, rewards: Tensor) -> Tensor:
    """[R] of ±1: with which sign the objective counts each response's log-prob; +1 where the weight is 0."""
    weight = {"log_prob": torch.ones_like(rewards), "log_prob_reward": rewards}.get(output_function, advantages)
    return torch.where(weight < 0, -1.0, 1.0)


def objective_weights(
    output_function: str,
    mask: Tensor,
    advantages: Tensor | None = None,
    rewards: Tensor | None = None,
) -> Tensor:
    """[R, T]: w_t of the log-prob objectives; 0 outside the mask. `advantages` [R, T] or [R], `rewards` [R]."""
    if output_function == "log_prob":
        return mask.float()
    if output_function == "log_prob_advantage":
        if advantages is None:
            raise AttributionError("output_function='log_prob_advantage' needs advantages")
        advantages = advantages[:, None] if advantages.dim() == 1 else advantages
        return torch.where(mask, advantages, 0.0)
    if output_function == "log_prob_reward":
        if rewards is None:
            raise AttributionError("output_function='log_prob_reward' needs rewards")
        if bool((rewards == 0).any()):
            warnings.warn(
                f"output_function='log_prob_reward': {int((rewards == 0).sum())} of {len(rewards)} responses have"
                " reward 0 and therefore no gradient at all; 'log_prob_advantage' keeps them in the picture",
                stacklevel=2,
            )
        return torch.where(mask, rewards[:, None].to(torch.float32), 0.0)
    raise AttributionError("output_function='training_loss' has no weights of its own: it is the training loss")


def objective(log_probs: Tensor, weights: Tensor) -> Tensor:
    """F = Σ w_t ℓ_t, a sum: its scale does not depend on how the batch was packed."""
    return (weights * log_probs).sum()
