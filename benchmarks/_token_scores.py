"""Scores of every token of a rollout at the weights that sampled it, for studies that ask what scores are good for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradtrace.algorithms import accepted
from gradtrace.attribution import InfluenceConfig, InfluenceTracer
from gradtrace.attribution.geometry import ClippedGradients
from gradtrace.batch import RolloutBatch
from gradtrace.policy.microbatch import Sequences
from gradtrace.training.components import Components

DEFAULT = InfluenceConfig(projection_dim_factor=0, loss_term_prompts=0, pairwise=False)
"""The product's default score, without projection and for every group."""

ANSWER_ONLY = '''def reward(response, item):
    """1 if the chain ends in the right digit, whatever stands before it."""
    return float(response.strip()[-1:] == item["expected"].strip()[-1:])
'''
"""A reward under which several chains of the demo's task are right."""


@dataclass(frozen=True, eq=False)
class TokenScores:
    """[R, T] each; 0 where there is no token, or no score."""

    step: Tensor
    """What training on the token does to its group's contrast."""
    likelier: Tensor
    """What making it likelier would do; 0 where the credit has no such score."""
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
    """Under GRPO's loss at ratio 1, whose terms are A ℓ with one advantage for all tokens of a response."""
    assert batch.rewards is not None
    policy, rows, sequences = parts.policy, torch.arange(len(batch)), Sequences.of(batch)
    advantages = batch.need("advantages")[:, 0]
    micro = sequences.padded(rows)
    count = float(batch.response_mask.sum())
    mixed = advantages != 0
    ratio = torch.where(mixed, -count / torch.where(mixed, advantages, 1.0), 0.0)
    older = config.target == "output_function"

    def terms(responses: list[int]) -> Tensor:
        chosen = torch.tensor(responses)
        weights = advantages[chosen].repeat_interleave(batch.response_lengths[chosen])
        log_probs = policy.statistics(sequences.micro_batch(chosen, policy.best_layout()))[0]
        return torch.stack([log_probs * weights, log_probs])

    with InfluenceTracer(policy.model, config=config, optimizer=parts.optimizer.adamw) as tracer:
        log_probs, entropies = policy.statistics(micro)
        with tracer.capture(
            response=rows,
            tokens=micro.tokens,
            accepted=accepted(batch.rewards, batch.group),
            group=batch.group,
            scale=-count,  # what is captured is the gradient of −Σ A ℓ / N
            target_scale=None if older else ratio,
            sign=torch.where(advantages < 0, -1.0, 1.0) if older else None,
        ):
            weights = advantages.repeat_interleave(batch.response_lengths) / count
            (-(log_probs * weights).sum()).backward()
        coming = ClippedGradients(policy.model, parts.config.actor.optim.grad_clip)
        trace = tracer.score(terms=terms if config.wants_loss_term else None, coming=coming)
    policy.model.zero_grad()
    mask = batch.response_mask

    def table(rows_of: list[Tensor] | None) -> Tensor:
        found = torch.zeros(mask.shape)
        for r, values in enumerate(rows_of or []):
            found[r, : len(values)] = values
        return found

    spread = (torch.zeros(mask.shape).masked_scatter(mask, v.detach()) for v in (log_probs, entropies))
    return TokenScores(table(trace.token_scores), table(trace.likelier_scores), *spread)
