"""What goes into and comes out of an advantage estimator and a policy loss.

Shapes everywhere in this package: R responses, T the longest of them. Token columns are float[R, T] and
`mask` is bool[R, T], as in `RolloutBatch`. Inputs set their padding to zero when they are built, so nothing
that stands in it, NaN included, reaches a result or a gradient, and no algorithm has to remember to.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradtrace.errors import GradtraceError


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with zeros outside the mask. Multiplying by the mask would keep a NaN; selecting does not."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_column(name: str, values: Tensor, mask: Tensor) -> Tensor:
    """`values` with zero padding; columns of one batch must have the mask's shape."""
    if values.shape != mask.shape:
        raise ValueError(f"{name} is {tuple(values.shape)}, the mask is {tuple(mask.shape)}")
    return masked(values, mask)


def required(column: Tensor | None, name: str, by: str) -> Tensor:
    """An optional column that this algorithm, with these options, cannot do without."""
    if column is None:
        raise GradtraceError(f"{by} needs {name}, and the batch has none: compute them, or choose another.")
    return column


def straight_through(weight: Tensor, log_probs: Tensor) -> Tensor:
    """Value `weight`, gradient weight · ∇log π: what a ratio of that size would have."""
    return weight.detach() * (log_probs - log_probs.detach()).exp()


def check_rewards(rewards: Tensor, group: Tensor) -> None:
    """Rewards float[R] and groups long[R] must align, and every reward must be a number."""
    if rewards.dim() != 1 or rewards.shape != group.shape:
        raise ValueError(f"rewards are {tuple(rewards.shape)}, groups {tuple(group.shape)}: both must be [R]")
    if not bool(torch.isfinite(rewards).all()):
        row = int((~torch.isfinite(rewards)).nonzero()[0])
        raise GradtraceError(
            f"The reward of response {row} (group {int(group[row])}) is {float(rewards[row])}. It would "
            "spoil the advantages of its whole group: make the reward function return a finite number."
        )


@dataclass
class AdvantageInputs:
    rewards: Tensor
    """float[R]: one reward per response, given at its last token."""
    group: Tensor
    """long[R]: responses to the same prompt have the same number."""
    mask: Tensor
    """bool[R, T]."""
    values: Tensor | None = None
    """float[R, T]: the critic's estimate *before* each token (gae)."""
    old_log_probs: Tensor | None = None
    """float[R, T]: for a KL penalty inside the reward."""
    ref_log_probs: Tensor | None = None
    """float[R, T]: for a KL penalty inside the reward."""

    def __post_init__(self) -> None:
        check_rewards(self.rewards, self.group)
        if self.mask.dtype != torch.bool or self.mask.shape[:1] != self.rewards.shape:
            raise ValueError(f"mask must be bool[R, T] with R = {len(self.rewards)}, is {self.mask.shape}")
        for name in ("values", "old_log_probs", "ref_log_probs"):
            if getattr(self, name) is not None:
                setattr(self, name, masked_column(name, getattr(self, name), self.mask).detach())


@dataclass
class AdvantageOutputs:
    advantages: Tensor
    """float[R, T], zero outside the mask."""
    returns: Tensor | None = None
    """float[R, T], zero outside the mask: the critic's targets, where the estimator has a critic."""


@dataclass
class LossInputs:
    log_probs: Tensor
    """float[R, T]: log-probs of the sampled tokens under the policy being trained; carries the gradient."""
    old_log_probs: Tensor
    """float[R, T]: the same before this step's first update."""
    advantages: Tensor
    """float[R, T]."""
    mask: Tensor
    """bool[R, T]."""
    ref_log_probs: Tensor | None = None
    """float[R, T]: under the frozen reference policy (losses with a KL term of their own)."""
    entropies: Tensor | None = None
    """float[R, T]: current entropy of the distribution each token was drawn from (archer)."""

    def __post_init__(self) -> None:
        if self.mask.dtype != torch.bool:
            raise ValueError(f"mask must be bool[R, T], is {self.mask.dtype}")
        for name in ("log_probs", "old_log_probs", "advantages", "ref_log_probs", "entropies"):
            values = getattr(self, name)
            if values is not None:
                # only the policy moves: on policy the same tensor may be given as log_probs and old_log_probs
                values = values if name in ("log_probs", "entropies") else values.detach()
                setattr(self, name, masked_column(name, values, self.mask))

    @property
    def log_ratio(self) -> Tensor:
        """float[R, T]: log π/π_old, held within ±20 so that its exponential stays finite in float32."""
        return (self.log_probs - self.old_log_probs).clamp(-20.0, 20.0)

    def clip_metrics(self, was_clipped: Tensor) -> dict[str, Tensor]:
        """What every loss reports that clips the ratio at some tokens, bool[R, T]."""
        log_ratio = self.log_ratio.detach()
        return {"actor/pg_clipfrac": was_clipped.to(log_ratio.dtype), "actor/ppo_kl": -log_ratio}


@dataclass
class LossOutputs:
    loss: Tensor
    """float[R, T]: to be *minimised*, per token, zero outside the mask. `aggregate` makes a scalar of it."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Name → float[R, T] without gradient, zero outside the mask. Per token, so that micro-batches
    add up: the mini-batch's metric is their sum over the mini-batch's number of tokens."""

    def metric_sums(self) -> dict[str, Tensor]:
        """Name → scalar: sum over this micro-batch's tokens."""
        return {name: values.sum() for name, values in self.metrics.items()}
