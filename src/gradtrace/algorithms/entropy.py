"""The entropy bonus: a loss term that rewards a policy for staying undecided."""

from __future__ import annotations

from torch import Tensor

from gradtrace.algorithms.types import masked_column


def entropy_bonus(entropies: Tensor, mask: Tensor, coefficient: float) -> Tensor:
    """float[R, T], to be minimised: −coefficient · H, zero outside the mask.

    `entropies` are those of the full next-token distribution at the sampled prefixes, with their gradient
    (`entropy_from_logits`); how the update changes which prefixes are sampled is not part of it.
    """
    return -coefficient * masked_column("entropies", entropies, mask)
