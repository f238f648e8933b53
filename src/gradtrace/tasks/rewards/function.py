"""What a reward function is, and the checks on what it returns.

A reward function takes (response: str, item: dict) and returns a number. One that judges many answers at once is
marked with `@batched` and takes (responses: list[str], items: list[dict]).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from gradtrace.errors import GradtraceError

if TYPE_CHECKING:  # it would import transformers, which choosing a reward does not need
    from gradtrace.tasks.base import Item

Function = TypeVar("Function", bound=Callable[..., Any])


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
        self.parts: dict[str, list[float]] = {}
        """The parts of a sum, by name and before their weights, of each of the last responses that were judged."""

    def __call__(self, responses: Sequence[str], items: Sequence[Item]) -> list[float]:
        if not self.takes_lists:
            return [self._one(response, item) for response, item in zip(responses, items, strict=True)]
        try:
            values = list(self.function(list(responses), list(items)))
        except GradtraceError:
            raise  # made for the user already
        except Exception as error:
            raise self._blame(error, responses, items) from error
        if len(values) != len(responses):
            raise GradtraceError(
                f"The reward function {self.name} returned {len(values)} rewards for {len(responses)} responses; "
                "it must return one number for each, in order."
            )
        return [
            self._checked(value, response, item) for value, response, item in zip(values, responses, items, strict=True)
        ]

    def _one(self, response: str, item: Item) -> float:
        try:
            value = self.function(response, item)
        except GradtraceError:
            raise
        except Exception as error:
            raise self._raised(error, response, item) from error
        return self._checked(value, response, item)

    def _checked(self, value: Any, response: str, item: Item) -> float:
        try:
            number = float(value)
        except Exception:  # `__float__` is the user's code, and 10**400 is too large
            number = math.nan
        if not math.isfinite(number):
            raise GradtraceError(
                f"The reward function {self.name} returned {shown(value)}, which is not a finite number,\n"
                + describe(response, item)
            )
        return number

    def _raised(self, error: Exception, response: str, item: Item) -> GradtraceError:
        return GradtraceError(
            f"The reward function {self.name} raised {type(error).__name__}: {error}\n" + describe(response, item)
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


def shown(value: Any) -> str:
    """What a message says of a value that may not even have a text."""
    try:
        return shorten(repr(value))
    except Exception:  # more than 4,300 digits, or a `__repr__` that raises
        return f"a value of type {type(value).__name__}"


def describe(response: str, item: Item) -> str:
    parts = {key: shorten(str(value)) for key, value in item.items()}
    return f"for the item {parts}\nand the response {shorten(response)!r}"


def shorten(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"
