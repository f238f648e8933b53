"""Rewards by name, rewards of the user's own, and the checks on what a reward function returns.

A reward function takes (response: str, item: dict) and returns a number. One that judges many answers at once is
marked with `@batched` and takes (responses: list[str], items: list[dict]).
"""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gradtrace.errors import GradtraceError
from gradtrace.tasks.base import Item

Function = TypeVar("Function", bound=Callable[..., Any])
NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")


def batched(function: Function) -> Function:
    """Mark a reward function that takes lists of responses and items and returns a list of numbers."""
    function.takes_lists = True  # type: ignore[attr-defined]
    return function


class RewardFunction:
    """A reward function with its name; calling it on lists returns one finite float per response."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self.function = function
        self.takes_lists = getattr(function, "takes_lists", False)

    def __call__(self, responses: Sequence[str], items: Sequence[Item]) -> list[float]:
        if not self.takes_lists:
            return [self._one(response, item) for response, item in zip(responses, items, strict=True)]
        try:
            values = list(self.function(list(responses), list(items)))
        except Exception as error:
            raise self._blame(error, responses, items) from error
        if len(values) != len(responses):
            raise GradtraceError(
                f"The reward function {self.name} returned {len(values)} rewards for {len(responses)} responses; "
                "it must return one number for each, in order."
            )
        return [
            self._checked(value, response, item)
            for value, response, item in zip(values, responses, items, strict=True)
        ]

    def _one(self, response: str, item: Item) -> float:
        try:
            value = self.function(response, item)
        except Exception as error:
            raise self._raised(error, response, item) from error
        return self._checked(value, response, item)

    def _checked(self, value: Any, response: str, item: Item) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise GradtraceError(
                f"The reward function {self.name} returned {value!r}, which is not a finite number,\n"
                + describe(response, item)
            )
        return number

    def _raised(self, error: Exception, response: str, item: Item) -> GradtraceError:
        return GradtraceError(
            f"The reward function {self.name} raised {type(error).__name__}: {error}\n"
            + describe(response, item)
        )

    def _blame(self, error: Exception, responses: Sequence[str], items: Sequence[Item]) -> GradtraceError:
        """The error with the one response that causes it, if one does alone."""
        for response, item in zip(responses, items, strict=True):
            try:
                self.function([response], [item])
            except Exception as alone:
                return self._raised(alone, response, item)
        return GradtraceError(
            f"The reward function {self.name} raised {type(error).__name__}: {error}\n"
            f"on {len(responses)} responses together, and on none of them alone."
        )


def describe(response: str, item: Item) -> str:
    shown = {key: shorten(str(value)) for key, value in item.items()}
    return f"for the item {shown}\nand the response {shorten(response)!r}"


def shorten(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


def gsm8k(response: str, item: Item) -> float:
    """1 if the last number after `####` in the response equals the one in the answer."""
    return float(number_after_marker(response) == number_after_marker(str(item["answer"])) is not None)


def last_number(response: str, item: Item) -> float:
    r"""1 if the number in the last \boxed{…}, else after the last `Answer:`, equals the answer's."""
    found = re.findall(r"\\boxed\{([^{}]*)\}", response) or re.findall(r"(?i)answer:\s*(.*)", response)
    expected = as_number(str(item["answer"]))
    return float(bool(found) and as_number(found[-1]) == expected is not None)


def number_after_marker(text: str) -> float | None:
    """The number after the last `####`, or of the whole text if that is nothing but a number."""
    _, marker, tail = text.rpartition("####")
    if not marker and not NUMBER.fullmatch(text.strip()):
        return None
    return as_number(tail)


def as_number(text: str) -> float | None:
    """The first number in the text, thousands separators and a currency sign removed."""
    match = NUMBER.search(text)
    return float(re.sub(r"[,$]", "", match.group())) if match else None


BUILT_IN: dict[str, Callable[..., Any]] = {"gsm8k": gsm8k, "last_number": last_number}


def load_user_reward(path: str) -> RewardFunction:
    """`my_rewards.py:my_reward` as a RewardFunction."""
    file_name, colon, name = path.rpartition(":")
    file = Path(file_name)
    if not colon or not name:
        raise GradtraceError(f"reward.path={path}: write FILE:FUNCTION, e.g. my_rewards.py:my_reward.")
    if not file.is_file():
        raise GradtraceError(f"reward.path={path}: there is no file {file.absolute()}.")
    spec = importlib.util.spec_from_file_location(f"gradtrace_user_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise GradtraceError(f"reward.path={path}: {file} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise GradtraceError(
            f"reward.path={path}: importing {file} raised {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise GradtraceError(f"reward.path={path}: {file} has no function '{name}'.")
    return RewardFunction(path, function)
