"""What the training loop asks of a task: prompts to train and to validate on, and a judgement of answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from gradtrace.batch import Environment

Item = dict[str, Any]
"""All that is known about a prompt: its text under "prompt", "answer", "source", and the task's own keys."""


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    item: Item


class Task(ABC):
    """Prompts and their judgement; a task of your own overrides what is abstract here and what it knows beyond that."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    environment: Environment | None = None
    """What answers the policy's calls, in a task of several turns (`rollout.max_turns`)."""

    @abstractmethod
    def next_prompts(self, count: int) -> list[Prompt]:
        """The next training prompts; the stream never ends."""

    @abstractmethod
    def validation_prompts(self, count: int) -> list[Prompt]:
        """The first `count` validation prompts (or all there are): always the same ones."""

    def held_out(self, count: int, key: str, report: Callable[[str], None]) -> list[Prompt]:
        """`validation_prompts`, said where there are fewer than the setting `key` asks for."""
        prompts = self.validation_prompts(count)
        if len(prompts) < count:
            report(f"{key}={count}: the task offers {len(prompts)} held-out prompts, and all of these are used.")
        return prompts

    @abstractmethod
    def read_prompts(self, files: list[str], key: str) -> list[Prompt]:
        """Prompts of this task from files of the user's, which the setting `key` names; no row at all is an error."""

    def find(self, ids: list[int]) -> Item | None:
        """The item whose prompt has these token ids, of training or validation; None where there is none."""
        return None

    @staticmethod
    @abstractmethod
    def reward(response: str, item: Item) -> float:
        """The judgement of a response where the run names no other reward."""

    @staticmethod
    def truth(item: Item, response: list[int]) -> tuple[list[int] | None, int | None]:
        """What is known beyond the reward: the ids of the right answer, and the index of the first wrong token of
        `response`; None where the task does not know."""
        return None, None

    @abstractmethod
    def state_dict(self) -> dict[str, int]:
        """The position in the stream of training prompts."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, int]) -> None:
        """Inverse of `state_dict`."""
