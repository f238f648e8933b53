"""Rewards by name, and from the user's own files.

    @register_reward("short")
    def short(response, item, *, limit=200):
        return float(len(response) <= limit)

then `reward.name=short reward.options.limit=100`, after `reward.path=my_rewards.py` has brought the file in.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from gradtrace.algorithms.registry import Registry
from gradtrace.errors import GradtraceError
from gradtrace.tasks.rewards.function import RewardFunction, batched

Function = TypeVar("Function", bound=Callable[..., Any])

rewards: Registry[Any, Any] = Registry("reward")
BUILT_IN = (
    "gradtrace.tasks.rewards.numbers",
    "gradtrace.tasks.rewards.calculation",
    "gradtrace.tasks.rewards.formats",
    "gradtrace.tasks.rewards.math_answers",
    "gradtrace.tasks.rewards.code",
    "gradtrace.tasks.rewards.classifier",
    "gradtrace.tasks.countdown",
)
"""Modules that register a reward when they are imported."""


def register_reward(name: str) -> Callable[[Function], Function]:
    """Make a function (response, item, *, options…) -> number available as `reward.name=NAME`."""

    def decorate(function: Function) -> Function:
        rewards.register(name)(function)
        return function

    return decorate


def named_reward(name: str, options: dict[str, Any] | None = None) -> RewardFunction:
    """The reward registered under `name`, with options bound; unknown names and options are errors."""
    import_built_in()
    found = rewards.get(name, **(options or {}))
    return RewardFunction(name, bind(found.function, found.options))


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
            own = parts[other.name] = other(responses, items)
            values = [value + weight * more for value, more in zip(values, own, strict=True)]
        return values

    combined = RewardFunction(" + ".join([main.name, *(f"{w:g}·{n}" for n, w in extra.items())]), total)
    combined.parts = parts
    return combined


def reward_names() -> list[str]:
    import_built_in()
    return rewards.names()


def import_built_in() -> None:
    for module in BUILT_IN:
        importlib.import_module(module)


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
    module = import_file(Path(file_name), path)
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
    own: Registry[Any, Any] = Registry("reward")
    own.register(path)(function)
    return RewardFunction(path, bind(function, own.get(path, **(options or {})).options))


def import_file(file: Path, path: str) -> ModuleType:
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
        raise GradtraceError(f"reward.path={path}: importing {file} raised {type(error).__name__}: {error}") from error
    return module
