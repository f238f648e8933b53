"""Terms added to the loss (KL to a reference, entropy bonus) and to the rewards (length).

Length shaping counts response tokens. A response is right if its score is at least `threshold`; `strength` is the most
that a reward changes, in units of reward: below 1 no right response falls to the reward 0 of a wrong one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradtrace.algorithms.groups import group_extremes
from gradtrace.algorithms.registry import masked_column, nearest
from gradtrace.errors import GradtraceError

KL_ESTIMATORS = ("k1", "k2", "k3", "k1+", "k3+")


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, estimator: str = "k3") -> Tensor:
    """Estimate KL(π ‖ reference) per token from sampled tokens, float[R, T], as a loss term to be minimised.

    With d = log π − log π_ref at the sampled token, held within ±20, where its exponential is finite in float32:

    | name | value | expected value | expected gradient, tokens sampled from π |
    |---|---|---|---|
    | `k1` | d | KL | zero: E[∇log π] = 0, so as a loss it only adds noise |
    | `k2` | d² / 2 | biased | ∇KL(π ‖ ref), right |
    | `k3` | e^−d + d − 1 | KL, low variance, ≥ 0 | ∇KL(ref ‖ π): the other direction |
    | `k1+`, `k3+` | as k1, k3 | as k1, k3 | ∇KL(π ‖ ref), right |

    The `+` forms take k2's gradient under the value of the other, straight through; verl has them under the same
    names. TRL uses plain k3; its `use_bias_correction_kl` multiplies that by π/π_old, which gives the right gradient
    too, off policy as well. None of those above is corrected for tokens sampled from an older policy. The result is
    zero outside the mask; gradient flows into `log_probs` only.
    """
    if estimator not in KL_ESTIMATORS:
        raise GradtraceError(f"There is no KL estimator '{estimator}': {nearest(estimator, KL_ESTIMATORS)}")
    log_probs = masked_column("log_probs", log_probs, mask)
    ref_log_probs = masked_column("ref_log_probs", ref_log_probs, mask).detach()
    difference = (log_probs - ref_log_probs).clamp(-20.0, 20.0)
    squared = 0.5 * difference.square()
    if estimator == "k2":
        return squared
    # expm1 keeps the digits that e^−d − 1 loses near d = 0, where a policy close to its reference lives
    value = difference if estimator.startswith("k1") else difference + (-difference).expm1()
    return value.detach() + squared - squared.detach() if estimator.endswith("+") else value


def entropy_bonus(entropies: Tensor, mask: Tensor, coefficient: float) -> Tensor:
    """Reward a policy for staying undecided: float[R, T], to be minimised, −coefficient · H, zero outside the mask.

    `entropies` are those of the full next-token distribution at the sampled prefixes, with their gradient
    (`entropy_from_logits`); how the update changes which prefixes are sampled is not part of it.
    """
    return -coefficient * masked_column("entropies", entropies, mask)


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
    shortest, longest = group_extremes(lengths, group)
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
