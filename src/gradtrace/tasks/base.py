"""What the training loop asks of a task: prompts to train and to validate on, and a judgement of answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

Item = dict[str, Any]
"""All that is known about a prompt: its text under "prompt", "answer", "source", and the task's own keys."""

Reward = Callable[[str, Item], float]
"""(response text, item) -> reward."""


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    item: Item


class Task(Protocol):
    name: str
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]

    def next_prompts(self, count: int) -> list[Prompt]:
        """The next training prompts; the stream never ends."""

    def validation_prompts(self, count: int) -> list[Prompt]:
        """The first `count` validation prompts (or all there are): always the same ones."""

    def reward(self, response: str, item: Item) -> float: ...

    def state_dict(self) -> dict[str, int]:
        """The position in the stream of training prompts."""

    def load_state_dict(self, state: dict[str, int]) -> None: ...
