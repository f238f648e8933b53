"""Advantages and policy losses: pure functions of tensors, of use in any training loop.

estimate = advantage("grpo", normalize_std=True)
advantages = estimate(AdvantageInputs(rewards, group, mask)).advantages            # float[R, T]

loss = policy_loss("ppo", clip_low=0.2, clip_high=0.28)
outputs = loss(LossInputs(log_probs, old_log_probs, advantages, mask))             # per token
aggregate(outputs.loss, mask, "token_mean", Denominator.of(mini_batch_mask)).backward()
"""

from gradtrace.algorithms import advantages as _advantages  # noqa: F401  registers the estimators
from gradtrace.algorithms import losses as _losses  # noqa: F401  registers the policy losses
from gradtrace.algorithms.advantages.grpo import dr_grpo, grpo
from gradtrace.algorithms.aggregation import AGGREGATIONS, Denominator, aggregate, token_weights
from gradtrace.algorithms.contrast import GroupCounts, accepted, constant_groups, count_groups, rejected
from gradtrace.algorithms.losses.ppo import ppo
from gradtrace.algorithms.registry import (
    Algorithm,
    advantage,
    advantage_names,
    policy_loss,
    policy_loss_names,
    register_advantage,
    register_policy_loss,
)
from gradtrace.algorithms.types import AdvantageInputs, AdvantageOutputs, LossInputs, LossOutputs

__all__ = [
    "AGGREGATIONS",
    "AdvantageInputs",
    "AdvantageOutputs",
    "Algorithm",
    "Denominator",
    "GroupCounts",
    "LossInputs",
    "LossOutputs",
    "accepted",
    "advantage",
    "advantage_names",
    "aggregate",
    "constant_groups",
    "count_groups",
    "dr_grpo",
    "grpo",
    "policy_loss",
    "policy_loss_names",
    "ppo",
    "register_advantage",
    "register_policy_loss",
    "rejected",
    "token_weights",
]
