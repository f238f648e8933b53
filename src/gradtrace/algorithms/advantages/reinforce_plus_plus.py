"""REINFORCE++: discounted returns per token, normalised over the whole batch instead of the group."""

from __future__ import annotations

import torch

from gradtrace.algorithms.advantages.gae import needs_reference, token_rewards, whiten
from gradtrace.algorithms.registry import AdvantageInputs, AdvantageOutputs, register_advantage


@register_advantage("reinforce_plus_plus", needs=needs_reference)
def reinforce_plus_plus(inputs: AdvantageInputs, *, gamma: float = 1.0, kl_coef: float = 0.0) -> AdvantageOutputs:
    """A_t = whiten(Σ_{s ≥ t} γ^{s−t} r_s), where r is the reward at the last token, less the KL penalty."""
    rewards = token_rewards(inputs, kl_coef)
    returns = torch.zeros_like(rewards)
    running = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        running = torch.where(inputs.mask[:, t], rewards[:, t] + gamma * running, running)
        returns[:, t] = running
    return AdvantageOutputs(whiten(returns, inputs.mask))
