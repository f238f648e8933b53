"""Everything that a run is made of, built from its configuration."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from gradtrace.algorithms import advantage, policy_loss
from gradtrace.config.root import Config
from gradtrace.policy.load import Reference, load_policy, load_reference, load_tokenizer
from gradtrace.policy.optimizer import Optimizer
from gradtrace.policy.policy import Policy
from gradtrace.rollout import Sampler
from gradtrace.rollout.sampler import HalfPrecisionSampler
from gradtrace.rollout.settings import RolloutConfig
from gradtrace.rollout.vllm_sampler import VllmSampler
from gradtrace.tasks.arithmetic import ArithmeticTask
from gradtrace.tasks.base import Task
from gradtrace.tasks.calculator import CalculatorTask
from gradtrace.tasks.datasets import DatasetTask
from gradtrace.tasks.rewards import RewardFunction, add_rewards, load_user_reward, named_reward
from gradtrace.tasks.settings import RewardConfig
from gradtrace.tasks.warm_start import WarmStartProgress, warm_start
from gradtrace.training.critic import Critic, load_critic

SMALL_MODEL = 2_000_000
"""Parameters below which operations are too short to share among many threads."""
SMALL_MODEL_THREADS = 1
SAMPLERS = {"float32": Sampler, "bfloat16": HalfPrecisionSampler}


@dataclass
class Components:
    config: Config
    task: Task
    reward: RewardFunction
    policy: Policy
    sampler: Sampler
    optimizer: Optimizer
    reference: Reference | None
    critic: Critic | None
    generators: dict[str, torch.Generator]
    """All randomness of the loop: `rollout` and `update`; prompts follow from the task's position."""


def build_components(
    config: Config, checkpoint: Path | None = None, progress: WarmStartProgress | None = None
) -> Components:
    """Load the model and the data, from the start or with the weights of a checkpoint."""
    if config.task.name in ("arithmetic", "calculator"):
        torch.set_num_threads(config.trainer.cpu_threads or SMALL_MODEL_THREADS)  # for the warm start as well
    reward = build_reward(config.reward)
    path, task = build_task(config, progress)
    if reward is not None:
        reward.check(task.known_items())
    seed_global_generators(config.trainer.seed)
    policy = load_policy(path, config.model, config.rollout.temperature, checkpoint and checkpoint / "policy")
    limit_threads(policy, config.trainer.cpu_threads)
    reference = None
    if needs_reference(config):
        reference = load_reference(policy, path, config.model, config.reference.path)
    critic = None
    if "values" in advantage(config.algorithm.advantage, **config.algorithm.advantage_options).needs:
        critic = load_critic(config.critic.path or path, config, checkpoint and checkpoint / "critic")
    return Components(
        config=config,
        task=task,
        reward=reward or RewardFunction(f"{task.name}.reward", task.reward),
        policy=policy,
        sampler=build_sampler(policy.model, task, config.rollout),
        optimizer=Optimizer(policy.trainable(), config.actor.optim, config.trainer.total_steps),
        reference=reference,
        critic=critic,
        generators={
            name: torch.Generator().manual_seed(1_000_003 * config.trainer.seed + index)
            for index, name in enumerate(("rollout", "update"))
        },
    )


def build_sampler(model: Any, task: Task, config: RolloutConfig) -> Sampler:
    pad, environment = task.tokenizer.pad_token_id, task.environment
    kind = VllmSampler if config.engine == "vllm" else SAMPLERS[config.precision]
    return kind(model, pad, config.max_batch_tokens, environment, config.max_turns, config.compile)


def seed_global_generators(seed: int) -> None:
    """The loop draws from `Components.generators`; LoRA's first weights, dropout and a user's reward from these."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def build_task(config: Config, progress: WarmStartProgress | None) -> tuple[str | Path, Task]:
    """The task, and the model to start from."""
    cache, seed = Path(config.trainer.runs_dir) / ".cache", config.trainer.seed
    if config.task.name == "arithmetic":
        path = config.model.path or warm_start(config.task.arithmetic, cache, progress)
        return path, ArithmeticTask(config.task.arithmetic, seed)
    if config.task.name == "calculator":
        path = config.model.path or warm_start(config.task.calculator, cache, progress)
        return path, CalculatorTask(config.task.calculator, seed)
    path = config.model.path
    return path, DatasetTask(config.data, load_tokenizer(path), config.trainer.seed)


def build_reward(config: RewardConfig) -> RewardFunction | None:
    """The reward that the configuration names; None where the task itself judges."""
    if config.path:
        reward = load_user_reward(config.path, config.name, config.options)
    elif config.name == "task":
        return None
    else:
        reward = named_reward(config.name, config.options)
    return add_rewards(reward, config.extra)


def needs_reference(config: Config) -> bool:
    algorithm = config.algorithm
    loss = policy_loss(algorithm.policy_loss, **algorithm.policy_loss_options)
    estimator = advantage(algorithm.advantage, **algorithm.advantage_options)
    return algorithm.kl_coef > 0 or "ref_log_probs" in loss.needs | estimator.needs


def limit_threads(policy: Policy, wanted: int) -> None:
    """Set torch's threads on a CPU: `wanted` (trainer.cpu_threads), or for 0 what suits the model's size."""
    if policy.device.type == "cpu":
        is_small = sum(p.numel() for p in policy.model.parameters()) < SMALL_MODEL
        torch.set_num_threads(wanted or (SMALL_MODEL_THREADS if is_small else len(os.sched_getaffinity(0))))
