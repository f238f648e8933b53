"""Generalised advantage estimation, for PPO with a critic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from gradtrace.algorithms.advantages.tokens import needs_reference, token_rewards, whiten
from gradtrace.algorithms.registry import register_advantage
from gradtrace.algorithms.types import AdvantageInputs, AdvantageOutputs, masked, required


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
