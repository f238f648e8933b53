"""Settings of the task: prompts, and how answers are rewarded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gradtrace.attribution.config import choice, number


@dataclass
class WarmStartConfig:
    target_accuracy: float = number(0.85, minimum=0, maximum=1)
    """Stage 1 (clean chains) ends when sampled accuracy reaches this."""
    max_steps: int = number(600, minimum=1)
    """Stage 1 ends after this many steps in any case."""
    corrupted_steps: int = number(40, minimum=0)
    """Stage 2: steps on chains with wrong habits, which RL then has to unlearn."""
    corruption: float = number(0.4, minimum=0, maximum=1)
    """Stage 2: probability that a step of a chain is done wrong, where it can be."""
    batch_size: int = number(64, minimum=1)
    """Chains per warm-start step."""
    lr: float = number(2e-3, minimum=0)
    """Learning rate of both stages."""
    seed: int = 0
    """Seed of the warm start. It is not `trainer.seed`, so that several seeds share one warm start."""


@dataclass
class ArithmeticConfig:
    operations: int = number(4, minimum=1, maximum=16)
    """Operations in a chain; `3+7*4-2+9=` has 4."""
    hidden_size: int = number(128, minimum=8)
    """Width of the tiny transformer."""
    layers: int = number(2, minimum=1)
    """Its depth."""
    heads: int = number(4, minimum=1)
    """Its attention heads; must divide hidden_size."""
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)


@dataclass
class CalculatorConfig:
    operations: int = number(1, minimum=1, maximum=8)
    """Operations in a problem, and calls that it takes; `47*38-906=` has 2."""
    digits: int = number(2, minimum=1, maximum=6)
    """Digits of the numbers in a problem."""
    hidden_size: int = number(64, minimum=8)
    """Width of the tiny transformer."""
    layers: int = number(2, minimum=1)
    """Its depth."""
    heads: int = number(4, minimum=1)
    """Its attention heads; must divide hidden_size."""
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    """Stage 1 teaches calls, stage 2 to do operations in the head, which goes wrong, with probability `corruption`."""


@dataclass
class TaskConfig:
    name: str = choice("arithmetic", "calculator", "dataset")
    """`arithmetic`: chains of single-digit operations, generated. `calculator`: longer numbers, with a tool to call
    (`rollout.max_turns`). `dataset`: prompts from files, see `data`."""
    arithmetic: ArithmeticConfig = field(default_factory=ArithmeticConfig)
    """Settings of the arithmetic task."""
    calculator: CalculatorConfig = field(default_factory=CalculatorConfig)
    """Settings of the calculator task."""


@dataclass
class DataConfig:
    train: list[str] = field(default_factory=list)
    """Training prompts: .jsonl, .json or .parquet files, folders, or hf:OWNER/NAME[:CONFIG][:SPLIT]."""
    validation: list[str] = field(default_factory=list)
    """Validation prompts, likewise. Empty: `validation_fraction` of the training rows is held out."""
    validation_fraction: float = number(0.02, minimum=0, maximum=0.5)
    """Share of the training rows held out (never trained on) when `validation` is empty."""
    prompt_key: str = "prompt"
    """Column with the prompt: a string, or a list of {role, content} messages."""
    answer_key: str = "answer"
    """Column with the answer; dots reach inside. Rows without `answer` may have verl's `reward_model.ground_truth`.
    Empty: there are none, for rewards that need none."""
    system_prompt: str = ""
    """System message of every prompt, instead of the row's own."""
    instruction: str = ""
    """Appended to every user prompt, e.g. how to mark the final answer."""
    chat_template: bool = True
    """Format prompts with the tokenizer's chat template, if it has one."""
    max_prompt_length: int = number(1024, minimum=1)
    """In tokens."""
    filter_overlong_prompts: bool = True
    """Drop prompts longer than max_prompt_length (counted in the log). False: they are an error."""
    shuffle: bool = True
    """A new order in every epoch, from `trainer.seed`."""
    train_batch_size: int = number(32, minimum=1)
    """Prompts per training step; `rollout.n` responses each."""


@dataclass
class RewardConfig:
    name: str = "task"
    """`task`: as the task judges (arithmetic: 1 if the whole chain is right). `gsm8k`: the number after ####.
    `last_number`: the number in the last \\boxed{} or after the last `Answer:`. `math`: any mathematical answer, by
    math-verify. More, and how to add one: docs/rewards.md."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that reward, e.g. {timeout: 10}."""
    path: str = ""
    """Your own: `my_rewards.py:my_reward`, a function (response: str, item: dict) -> float; or the file alone, and
    `name` is a reward that it registers."""
    extra: dict[str, float] = field(default_factory=dict)
    """Further rewards by name, added with these weights: {think_format: 0.1}."""
    flip_probability: float = number(0.0, minimum=0, maximum=1)
    """For studies of robustness: a training reward r becomes 1 − r with this probability. Validation rewards never."""
