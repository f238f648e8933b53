"""A weight that is used as a constant, on a token whose log-prob carries the gradient."""

from __future__ import annotations

from torch import Tensor


def straight_through(weight: Tensor, log_probs: Tensor) -> Tensor:
    """Value `weight`, gradient weight · ∇log π: what a ratio of that size would have."""
    return weight.detach() * (log_probs - log_probs.detach()).exp()
