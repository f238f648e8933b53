"""The run's reward as verl calls it: one response, with what the launcher wrote about its prompt.

verl loads this file by its path (`reward.custom_reward_function`), in its reward workers.
"""

from __future__ import annotations

import functools
import json
import threading
from typing import Any

from gradtrace.config import Config
from gradtrace.config_loader import load_config
from gradtrace.tasks.named import TASKS
from gradtrace.tasks.rewards import RewardFunction
from gradtrace.training.parts import build_reward

_loading = threading.Lock()


@functools.cache
def reward_of(config_file: str) -> RewardFunction:
    config: Config = load_config([f"recipe={config_file}"])
    reward = build_reward(config.reward)
    if reward is not None:
        return reward
    name = config.task.name
    return RewardFunction(f"{name}.reward", TASKS[name].reward)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any],
    config: str,
    **more: Any,
) -> float:
    item = json.loads(extra_info["gradtrace_item"])
    with _loading:  # verl calls from several threads, and composing a configuration is not made for that
        reward = reward_of(config)
    return reward([solution_str], [item])[0]
