"""How responses are judged: rewards by name, by file, with checks on what they return. See docs/rewards.md."""

from gradtrace.tasks.rewards.function import RewardFunction, batched, describe, shorten
from gradtrace.tasks.rewards.numbers import gsm8k, last_number
from gradtrace.tasks.rewards.registry import (
    add_rewards,
    load_user_reward,
    named_reward,
    register_reward,
    reward_names,
)

__all__ = [
    "RewardFunction",
    "add_rewards",
    "batched",
    "describe",
    "gsm8k",
    "last_number",
    "load_user_reward",
    "named_reward",
    "register_reward",
    "reward_names",
    "shorten",
]
