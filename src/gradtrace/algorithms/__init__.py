"""Advantages and policy losses: pure functions of tensors, of use in any training loop.

estimate = advantage("grpo", normalize_std=True)
advantages = estimate(AdvantageInputs(rewards, group, mask)).advantages            # float[R, T]

loss = policy_loss("ppo", clip_low=0.2, clip_high=0.28)
outputs = loss(LossInputs(log_probs, old_log_probs, advantages, mask))             # per token
aggregate(outputs.loss, mask, "token_mean", Denominator.of(mini_batch_mask)).backward()
"""

from gradtrace.algorithms.advantages.gae import gae
from gradtrace.algorithms.advantages.grpo import dr_grpo, grpo
from gradtrace.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus
from gradtrace.algorithms.advantages.rloo import rloo
from gradtrace.algorithms.aggregation import AGGREGATIONS, Denominator, aggregate, token_weights
from gradtrace.algorithms.entropy import entropy_bonus
from gradtrace.algorithms.groups import GroupCounts, accepted, constant_groups, count_groups, rejected
from gradtrace.algorithms.kl import KL_ESTIMATORS, kl_estimate
from gradtrace.algorithms.length_shaping import cosine_shaping, shortest_shaping, soft_overlong_penalty
from gradtrace.algorithms.logits import entropy_from_logits, log_probs_and_entropies, log_probs_from_logits
from gradtrace.algorithms.losses.archer import archer, aspo_weights, high_entropy_tokens
from gradtrace.algorithms.losses.cispo import cispo
from gradtrace.algorithms.losses.gspo import gspo
from gradtrace.algorithms.losses.ppo import ppo
from gradtrace.algorithms.losses.value import value_loss
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
    "KL_ESTIMATORS",
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
    "archer",
    "aspo_weights",
    "cispo",
    "constant_groups",
    "cosine_shaping",
    "count_groups",
    "dr_grpo",
    "entropy_bonus",
    "entropy_from_logits",
    "gae",
    "grpo",
    "gspo",
    "high_entropy_tokens",
    "kl_estimate",
    "log_probs_and_entropies",
    "log_probs_from_logits",
    "policy_loss",
    "policy_loss_names",
    "ppo",
    "register_advantage",
    "register_policy_loss",
    "reinforce_plus_plus",
    "rejected",
    "rloo",
    "shortest_shaping",
    "soft_overlong_penalty",
    "token_weights",
    "value_loss",
]
