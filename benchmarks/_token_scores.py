"""Scores of every token of a rollout at the weights that sampled it, for studies that ask what scores are good for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradtrace.algorithms import policy_loss
from gradtrace.attribution import InfluenceConfig
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.verify.trial import Trial
from gradtrace.instruments.verify.verification import scoring
from gradtrace.policy.microbatch import Sequences
from gradtrace.training.components import Components

DEFAULT = InfluenceConfig(accepted_rejected_scope="per_prompt")
"""Influence on the own prompt, of every group."""

ANSWER_ONLY = '''def reward(response, item):
    """1 if the chain ends in the right digit, whatever stands before it."""
    return float(response.strip()[-1:] == item["expected"].strip()[-1:])
'''
"""A reward under which several chains of the demo's task are right."""


@dataclass(frozen=True, eq=False)
class TokenScores:
    """[R, T] each; 0 where there is no token, or no score."""

    step: Tensor
    """What training on the token does to its own prompt's objective."""
    likelier: Tensor
    """What making it likelier would do; 0 for scores from captured factors."""
    log_probs: Tensor
    entropies: Tensor


@torch.no_grad()
def token_statistics(parts: Components, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of all tokens, [R, T] each and 0 where there is no token, from a forward pass alone."""
    policy, rows = parts.policy, torch.arange(len(batch))
    found = policy.statistics(Sequences.of(batch).micro_batch(rows, policy.best_layout()))
    mask = batch.response_mask
    log_probs, entropies = (torch.zeros(mask.shape).masked_scatter(mask, values) for values in found)
    return log_probs, entropies


def token_scores(parts: Components, batch: RolloutBatch, config: InfluenceConfig = DEFAULT) -> TokenScores:
    """The whole rollout as one mini-batch."""
    clip, algorithm = parts.config.actor.optim.grad_clip, parts.config.algorithm
    loss = policy_loss(algorithm.policy_loss, **algorithm.policy_loss_options)
    temperature = parts.policy.temperature
    trial = Trial(parts.policy.model, parts.optimizer.adamw, batch, temperature=temperature, grad_clip=clip, loss=loss)
    scores = scoring(trial, config, len(batch.prompts))()
    step, mask = torch.zeros(batch.response_mask.shape), batch.response_mask
    for r, values in scores.items():
        step[r, mask[r]] = values.float()
    # The change of its log-prob by the step of its group is, by symmetry, what its own log-prob's gradient does for it.
    factors = trial.factors_of_log_probs.float()
    likelier = torch.where(factors != 0, step / factors, 0.0) if config.is_parts else torch.zeros_like(step)
    log_probs, entropies = token_statistics(parts, batch)
    return TokenScores(step, likelier, log_probs, entropies)
