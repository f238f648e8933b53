"""What a data set has to say about itself to be prepared."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gradtrace.errors import GradtraceError
from gradtrace.tasks.sources import Row


@dataclass(frozen=True)
class Example:
    """One problem: its text, the answer, and columns of its own that the judge needs."""

    question: str
    ground_truth: Any
    """A string, or a struct (countdown: numbers and target)."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Kept beside verl's columns, e.g. `test_list` of a programming problem."""
    split: str = ""
    """`train` or `test` where the row says so itself."""
    start: str = ""
    """What the answer begins with: the model is to go on from there."""

    @cached_property
    def loose_key(self) -> str:
        """A text that is the same for texts which differ in white space only."""
        return " ".join(unicodedata.normalize("NFC", self.question).split())

    @cached_property
    def overlap_key(self) -> str:
        """Words and numbers alone: what counts as seen already, when training and test data are compared."""
        return " ".join(re.findall(r"[^\W_]+", unicodedata.normalize("NFKC", self.question).lower()))


@dataclass(frozen=True)
class Preparation:
    name: str
    ability: str
    """The value of verl's column `ability`: math or code."""
    default_source: str
    test_source: str
    """Name of the test split on the hub; empty where there is none."""
    licence: str
    homepage: str
    reward: str
    """Name of the reward that judges answers to it."""
    example: Callable[[Row], Example | None]
    """Read a row; None leaves it out (it belongs to another data set of the same file)."""
    instruction: str = ""
    """Appended to the question: how to mark the answer."""
    system_prompt: str = ""
    solved: tuple[tuple[str, str], ...] = ()
    """(question, answer) pairs that `--shots` puts before every question, as earlier turns of the conversation."""
    shots: int = 0
    """How many of them."""

    def messages(self, example: Example) -> list[dict[str, str]]:
        """The conversation up to the question, instruction included, and the start of its answer."""
        turns = [("system", self.system_prompt)] if self.system_prompt else []
        for question, answer in self.solved[: self.shots]:
            turns += [("user", question + self.instruction), ("assistant", answer)]
        turns.append(("user", example.question.strip() + self.instruction))
        if example.start:
            turns.append(("assistant", example.start))
        return [{"role": role, "content": content} for role, content in turns]

    def row(self, example: Example, split: str, index: int) -> Row:
        """The example in verl's column format."""
        return {
            "data_source": self.name,
            "prompt": self.messages(example),
            "ability": self.ability,
            "reward_model": {"style": "rule", "ground_truth": example.ground_truth},
            "extra_info": {"split": split, "index": index, "question": example.question.strip()},
            **example.columns,
        }


def question_of(row: Row, *names: str) -> str:
    """The text of the first of these columns that a row has; of a conversation, what the user says."""
    for name in names:
        value = row.get(name)
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            return "\n".join(message["content"] for message in value if message.get("role") == "user")
    raise GradtraceError(f"a row has none of the columns {', '.join(names)}; it has {', '.join(row)}.")


def answer_of(row: Row, *names: str) -> Any:
    """The first of these columns that a row has, or verl's ground truth."""
    verl = row.get("reward_model")
    if isinstance(verl, dict) and "ground_truth" in verl:
        return verl["ground_truth"]
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise GradtraceError(f"a row has no answer ({', '.join(names)}, reward_model); it has {', '.join(row)}.")


def split_of(row: Row) -> str:
    extra = row.get("extra_info")
    return str(extra.get("split", "")) if isinstance(extra, dict) else ""
