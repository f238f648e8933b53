"""Rewards by length: among right responses the short ones earn more, and responses near the limit lose. Added to the
rewards before advantages.

Lengths count response tokens, a response is right if its score is at least `threshold`, and `strength` is the most
that a reward changes, in units of reward: below 1 no right response falls to the reward 0 of a wrong one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradtrace.errors import GradtraceError


def cosine_shaping(lengths: Tensor, right: Tensor, max_length: int, strength: float) -> Tensor:
    """float[R] in [−strength, 0]. Right: 0 when short, −strength at the limit. Wrong: −strength when short, 0 at it.

    The cosine of Yeo et al. (2025), "Demystifying Long Chain-of-Thought Reasoning": a wrong model is given reason to
    think on, a right one to come to the point. lengths long[R], right bool[R].
    """
    fallen = (1 - torch.cos(math.pi * lengths.clamp(max=max_length) / max_length)) / 2
    return -strength * torch.where(right, fallen, 1 - fallen)


def shortest_shaping(lengths: Tensor, right: Tensor, group: Tensor, strength: float) -> Tensor:
    """float[R] in [−strength, strength] / 2, by length relative to the group: the shortest +½, the longest −½.

    A wrong response never gains. From Kimi k1.5. A group of one length is left alone. lengths, group long[R].
    """
    lengths = lengths.to(torch.float32)
    _, index = group.unique(return_inverse=True)
    groups = int(index.max()) + 1 if len(index) else 0
    empty = torch.zeros(groups, dtype=lengths.dtype, device=lengths.device)
    shortest = empty.scatter_reduce(0, index, lengths, "amin", include_self=False)[index]
    longest = empty.scatter_reduce(0, index, lengths, "amax", include_self=False)[index]
    spread = longest - shortest
    position = 0.5 - (lengths - shortest) / spread.clamp(min=1.0)
    shaping = torch.where(right, position, position.clamp(max=0.0))
    return strength * torch.where(spread > 0, shaping, torch.zeros_like(shaping))


def soft_overlong_penalty(lengths: Tensor, max_length: int, buffer: int, penalty: float = 1.0) -> Tensor:
    """float[R] ≤ 0: DAPO's penalty for responses near the length limit. lengths long[R].

    Zero up to max_length − buffer tokens, then falling linearly to −penalty at max_length, and no further.
    """
    if not 0 < buffer <= max_length:
        raise GradtraceError(
            f"The overlong buffer is {buffer} tokens and the length limit {max_length}: the buffer is the "
            "last part of the allowed length, so it must be at least 1 and at most the limit."
        )
    excess = lengths - (max_length - buffer)
    return -penalty * (excess / buffer).clamp(0.0, 1.0)
