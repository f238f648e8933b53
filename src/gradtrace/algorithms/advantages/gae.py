"""Generalised advantage estimation, for PPO with a critic; and what estimators with a time axis share: rewards per
token, and whitening over the batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gradtrace.algorithms.registry import AdvantageInputs, AdvantageOutputs, masked, register_advantage, required


def needs_reference(options: dict[str, Any]) -> Iterable[str]:
    """A KL penalty inside the reward compares two sets of log-probs."""
    return ("old_log_probs", "ref_log_probs") if options["kl_coef"] else ()


def token_rewards(inputs: AdvantageInputs, kl_coef: float) -> Tensor:
    """float[R, T]: the reward at each response's last token, minus kl_coef · KL at every token.

    KL = log π_old − log π_ref, the k1 estimate: inside a reward its value counts, not its gradient.
    """
    mask = inputs.mask
    position = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    last = torch.where(mask, position, -1).amax(-1, keepdim=True)  # [R, 1]; −1 in a row without tokens
    rewards = (position == last) * inputs.rewards.unsqueeze(-1)
    if kl_coef:
        old = required(inputs.old_log_probs, "old_log_probs", "a KL penalty inside the reward")
        reference = required(inputs.ref_log_probs, "ref_log_probs", "a KL penalty inside the reward")
        rewards = rewards - kl_coef * (old - reference)
    return rewards


def whiten(values: Tensor, mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """(values − mean)/√(sample variance + ε) over all tokens of the batch; zero outside the mask."""
    count = mask.sum()
    mean = masked(values, mask).sum() / count.clamp(min=1)
    centred = masked(values - mean, mask)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    return centred * (variance + epsilon).rsqrt()


def _needs(options: dict[str, Any]) -> Iterable[str]:
    return ("values", *needs_reference(options))


@register_advantage("gae", needs=_needs)
def gae(
    inputs: AdvantageInputs,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    whiten_advantages: bool = True,
    kl_coef: float = 0.0,
) -> AdvantageOutputs:
    """A_t = δ_t + γλ·A_{t+1} with δ_t = r_t + γ·V_{t+1} − V_t; returns = A + V, before the whitening.

    The value after the last token is zero. Masked tokens inside a response (tool output) are stepped over.
    """
    values = required(inputs.values, "values", "gae, an estimator for a policy with a critic,")
    rewards, mask = token_rewards(inputs, kl_coef), inputs.mask
    advantages = torch.zeros_like(values)
    next_value = values.new_zeros(len(values))
    running = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        running = torch.where(mask[:, t], delta + gamma * lam * running, running)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = running
    returns = masked(advantages + values, mask)
    advantages = whiten(advantages, mask) if whiten_advantages else masked(advantages, mask)
    return AdvantageOutputs(advantages, returns)
