"""How responses are judged: rewards by name, by file, with checks on what they return. See docs/rewards.md.

A reward function takes (response: str, item: dict) and returns a number. One that judges many answers at once is
marked with `@batched` and takes (responses: list[str], items: list[dict]).

    @register_reward("short")
    def short(response, item, *, limit=200):
        return float(len(response) <= limit)

then `reward.name=short reward.options.limit=100`, after `reward.path=my_rewards.py` has brought the file in.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gradtrace.algorithms.registry import Registry, import_file
from gradtrace.errors import GradtraceError

if TYPE_CHECKING:  # it would import transformers, which choosing a reward does not need
    from gradtrace.tasks.base import Item

Function = TypeVar("Function", bound=Callable[..., Any])


def batched(function: Function) -> Function:
    """Mark a reward function that takes lists of responses and items and returns a list of numbers."""
    function.takes_lists = True  # type: ignore[attr-defined]
    return function


def checked_by(check: Callable[[Item], None]) -> Callable[[Function], Function]:
    """Mark a reward function with what refuses an item that no response can be judged by."""

    def mark(function: Function) -> Function:
        function.check = check  # type: ignore[attr-defined]
        return function

    return mark


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

    def check(self, items: Iterable[Item]) -> None:
        """GradtraceError for the first item by which this function, or a part of its sum, cannot judge."""
        refuse = getattr(self.function, "check", None)
        if refuse is not None:
            for item in items:
                refuse(item)

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


# ---------------------------------------------------------------- by name, and from files

rewards: Registry[Any, Any] = Registry(
    "reward",
    [
        "gradtrace.tasks.rewards.simple",
        "gradtrace.tasks.rewards.code",
        "gradtrace.tasks.rewards.classifier",
        "gradtrace.tasks.countdown",
    ],
)


register_reward = rewards.register
"""Makes a function (response, item, *, options…) -> number available as `reward.name=NAME`."""


def named_reward(name: str, options: dict[str, Any] | None = None) -> RewardFunction:
    """The reward registered under `name`, with options bound; unknown names and options are errors."""
    reward = rewards.get(name, **(options or {}))
    return RewardFunction(name, bind(reward.function, reward.options))


def add_rewards(main: RewardFunction, extra: dict[str, float]) -> RewardFunction:
    """`main` plus other rewards by name, each times its weight."""
    if not extra:
        return main
    others = [(named_reward(name), weight) for name, weight in extra.items()]

    parts: dict[str, list[float]] = {}

    @batched
    def total(responses: list[str], items: list[dict[str, Any]]) -> list[float]:
        values = parts[main.name] = main(responses, items)
        for other, weight in others:
            extras = parts[other.name] = other(responses, items)
            values = [value + weight * more for value, more in zip(values, extras, strict=True)]
        return values

    def check(item: Item) -> None:
        for each in (main, *(other for other, _ in others)):
            each.check([item])

    total.check = check  # type: ignore[attr-defined]
    combined = RewardFunction(" + ".join([main.name, *(f"{w:g}·{n}" for n, w in extra.items())]), total)
    combined.parts = parts
    return combined


def bind(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    if not options:
        return function
    bound = functools.partial(function, **options)
    functools.update_wrapper(bound, function)  # keeps the mark of @batched
    return bound


def load_user_reward(path: str, name: str = "", options: dict[str, Any] | None = None) -> RewardFunction:
    """`my_rewards.py:my_reward` as a RewardFunction; with `my_rewards.py` alone, the one it registers as `name`."""
    # Not the colon of a Windows drive or of a folder's name: a function's name has no slash and no dot.
    file_name, colon, function_name = path.rpartition(":")
    if not colon or "/" in function_name or "." in function_name:
        file_name, function_name = path, ""
    before = set(rewards.names())
    module = import_file(Path(file_name), f"reward.path={path}")
    if not function_name:
        if name in ("", "task"):
            registered = sorted(set(rewards.names()) - before)
            raise GradtraceError(
                f"reward.path={path}: write FILE:FUNCTION, e.g. my_rewards.py:my_reward, or choose one of the "
                f"rewards that the file registers with reward.name (it registers: {', '.join(registered) or 'none'})."
            )
        return named_reward(name, options)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise GradtraceError(f"reward.path={path}: {file_name} has no function '{function_name}'.")
    alone: Registry[Any, Any] = Registry("reward")
    alone.register(path)(function)
    return RewardFunction(path, bind(function, alone.get(path, **(options or {})).options))
