"""Tasks whose problems are drawn at random and judged by rule: no data, and as many prompts as one likes."""

from __future__ import annotations

import random
import zlib
from abc import abstractmethod
from typing import Generic, Protocol, TypeVar

from gradtrace.errors import GradtraceError
from gradtrace.tasks.base import Item, Prompt, Task
from gradtrace.tasks.sources import read_source

VALIDATION_SHARE = 16
"""One problem in so many belongs to validation and is never trained on."""


class Problem(Protocol):
    @property
    def prompt(self) -> str: ...


P = TypeVar("P", bound=Problem)


def is_validation(problem: Problem) -> bool:
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
