"""What the training loop asks of a task: prompts to train and to validate on, and a judgement of answers."""

from __future__ import annotations

import random
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from transformers import PreTrainedTokenizerBase

from gradtrace.batch import Environment
from gradtrace.errors import GradtraceError
from gradtrace.tasks.sources import read_source

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

    def known_items(self) -> list[Item]:
        """All items that are known before a run starts; empty where they are generated."""
        return []

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


VALIDATION_SHARE = 16
"""One problem in so many belongs to validation and is never trained on."""


class Exercise(Protocol):
    @property
    def prompt(self) -> str: ...


P = TypeVar("P", bound=Exercise)


def is_validation(problem: Exercise) -> bool:
    return zlib.crc32(problem.prompt.encode()) % VALIDATION_SHARE == 0


class GeneratedTask(Task, Generic[P]):
    vocabulary: list[str]
    """The text of every token id."""
    example: str
    """A prompt, for whoever wrote one that is none."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._drawn = 0

    @abstractmethod
    def draw(self, rng: random.Random) -> P:
        """Draw one problem with `rng`, which alone decides which one it is."""

    @property
    @abstractmethod
    def possible(self) -> int:
        """How many different problems there are."""

    @abstractmethod
    def prompt_of(self, problem: P) -> Prompt:
        """Its token ids, and what is known about it."""

    @abstractmethod
    def parse(self, text: str) -> Prompt | None:
        """The prompt that is written so; None if it is no problem."""

    def _problem(self, split: str, index: int) -> P:
        # Each problem from its own seed: the position in the stream is the whole state of it.
        return self.draw(random.Random(f"{split}/{self.seed}/{index}"))

    def next_prompts(self, count: int) -> list[Prompt]:
        prompts: list[Prompt] = []
        while len(prompts) < count:
            problem = self._problem("train", self._drawn)
            self._drawn += 1
            if not is_validation(problem):
                prompts.append(self.prompt_of(problem))
        return prompts

    def validation_prompts(self, count: int) -> list[Prompt]:
        count = min(count, self.possible // (2 * VALIDATION_SHARE))  # of short ones there are not that many
        prompts: dict[str, Prompt] = {}
        index = 0
        while len(prompts) < count:
            problem = self._problem("validation", index)
            index += 1
            if is_validation(problem):
                prompts.setdefault(problem.prompt, self.prompt_of(problem))
        return list(prompts.values())

    def read_prompts(self, files: list[str], key: str) -> list[Prompt]:
        prompts = []
        for file in files:
            for number, row in enumerate(read_source(file, key)):
                prompt = self.parse(str(row.get("prompt", "")))
                if prompt is None:
                    raise GradtraceError(
                        f"{key}: {file}, row {number} is no problem of the {self.name} task: {row}. Write "
                        f'{{"prompt": "{self.example}"}}.'
                    )
                prompts.append(prompt)
        if not prompts:
            raise GradtraceError(f"{key}={files}: no rows, so there is no validation set.")
        return prompts

    def find(self, ids: list[int]) -> Item | None:
        known = len(self.vocabulary)
        prompt = self.parse("".join(self.vocabulary[token] for token in ids if 0 <= token < known))
        return None if prompt is None else prompt.item

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self._drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._drawn = state["drawn"]


def task_class(name: str) -> type[Task]:
    """The task that `task.name` names; `Task` for a name that is none of ours."""
    from gradtrace.tasks.arithmetic import ArithmeticTask
    from gradtrace.tasks.calculator import CalculatorTask
    from gradtrace.tasks.datasets import DatasetTask

    classes: tuple[type[Task], ...] = (ArithmeticTask, CalculatorTask, DatasetTask)
    return {task.name: task for task in classes}.get(name, Task)
