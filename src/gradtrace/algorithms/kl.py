"""Per-token estimates of KL(π ‖ reference) from sampled tokens, as a loss term to be minimised.

With d = log π − log π_ref at the sampled token:

| name | value | expected value | expected gradient, tokens sampled from π |
|---|---|---|---|
| `k1` | d | KL | zero: E[∇log π] = 0, so as a loss it only adds noise |
| `k2` | d² / 2 | biased | ∇KL(π ‖ ref), right |
| `k3` | e^−d + d − 1 | KL, low variance, ≥ 0 | ∇KL(ref ‖ π): the other direction |
| `k1+`, `k3+` | as k1, k3 | as k1, k3 | ∇KL(π ‖ ref), right |

The `+` forms take k2's gradient under the value of the other, straight through; verl has them under the same
names. TRL uses plain k3; its `use_bias_correction_kl` multiplies that by π/π_old, which gives the right
gradient too, off policy as well. None of those above is corrected for tokens sampled from an older policy.
"""

from __future__ import annotations

from torch import Tensor

from gradtrace.algorithms.registry import nearest
from gradtrace.algorithms.types import masked_column
from gradtrace.errors import GradtraceError

KL_ESTIMATORS = ("k1", "k2", "k3", "k1+", "k3+")


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, estimator: str = "k3") -> Tensor:
    """float[R, T]: zero outside the mask; gradient flows into `log_probs` only.

    The difference of log-probs is held within ±20, where its exponential is still finite in float32.
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
