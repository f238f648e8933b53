"""What the estimators with a time axis share: rewards per token, and whitening over the batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gradtrace.algorithms.types import AdvantageInputs, masked, required


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
