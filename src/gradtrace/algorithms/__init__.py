"""Advantages and policy losses: pure functions of tensors, of use in any training loop.

estimate = advantage("grpo", normalize_std=True)
advantages = estimate(AdvantageInputs(rewards, group, mask)).advantages            # float[R, T]

loss = policy_loss("ppo", clip_low=0.2, clip_high=0.28)
outputs = loss(LossInputs(log_probs, old_log_probs, advantages, mask))             # per token
aggregate(outputs.loss, mask, "token_mean", Denominator.of(mini_batch_mask)).backward()
"""

# ruff: noqa: F401  (names for type checkers; `__getattr__` imports them)
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradtrace.algorithms.aggregation import AGGREGATIONS, Denominator, aggregate, token_weights
    from gradtrace.algorithms.groups import accepted, constant_groups, count_groups, rejected
    from gradtrace.algorithms.logits import entropy_from_logits, log_probs_and_entropies, log_probs_from_logits
    from gradtrace.algorithms.losses.archer import high_entropy_tokens
    from gradtrace.algorithms.losses.ppo import value_loss
    from gradtrace.algorithms.penalties import (
        KL_ESTIMATORS,
        cosine_shaping,
        entropy_bonus,
        kl_estimate,
        shortest_shaping,
        soft_overlong_penalty,
    )
    from gradtrace.algorithms.registry import (
        AdvantageInputs,
        AdvantageOutputs,
        Algorithm,
        LossInputs,
        LossOutputs,
        advantage,
        advantage_names,
        policy_loss,
        policy_loss_names,
        register_advantage,
        register_policy_loss,
    )

_NAMES = {
    "aggregation": "AGGREGATIONS Denominator aggregate token_weights",
    "groups": "accepted constant_groups count_groups rejected",
    "logits": "entropy_from_logits log_probs_and_entropies log_probs_from_logits",
    "losses.archer": "high_entropy_tokens",
    "losses.ppo": "value_loss",
    "penalties": "KL_ESTIMATORS cosine_shaping entropy_bonus kl_estimate shortest_shaping soft_overlong_penalty",
    "registry": "AdvantageInputs AdvantageOutputs Algorithm LossInputs LossOutputs advantage advantage_names "
    "policy_loss policy_loss_names register_advantage register_policy_loss",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Import a name on its first use: the settings of a run are read without torch."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'gradtrace.algorithms' has no attribute {name!r}")
    return getattr(import_module(f"gradtrace.algorithms.{_MODULE_OF[name]}"), name)
