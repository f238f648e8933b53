"""Algorithms by name, so that a config can choose one and a user can add one.

@register_policy_loss("reinforce")
def reinforce(inputs: LossInputs, *, scale: float = 1.0) -> LossOutputs:
    return LossOutputs(-scale * inputs.advantages * inputs.log_probs)

loss = policy_loss("reinforce", scale=0.5)      # names and options are checked here, before any work
outputs = loss(LossInputs(...))
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from gradtrace.algorithms.types import AdvantageInputs, AdvantageOutputs, LossInputs, LossOutputs
from gradtrace.errors import GradtraceError

Inputs = TypeVar("Inputs")
Outputs = TypeVar("Outputs")
Needs = Callable[[dict[str, Any]], Iterable[str]]


def nearest(name: str, valid: Iterable[str]) -> str:
    """The end of an error message: the closest valid name, then all of them."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{hint}Valid: {', '.join(names) or 'none'}."


@dataclass(frozen=True)
class Algorithm(Generic[Inputs, Outputs]):
    """A registered function with its options bound."""

    name: str
    function: Callable[..., Outputs]
    options: dict[str, Any]
    """Every option the function takes, defaults included."""
    needs: frozenset[str]
    """Optional input columns to compute for it, with these options (values, ref_log_probs, entropies …)."""
    own_kl: bool = False
    """A policy loss that has a KL term of its own, with these options."""
    plain_at_ratio_one: bool = False
    """A policy loss whose gradient at ratio 1 is −A ∇ℓ for every token; an influence trace may then ride on it."""

    def __call__(self, inputs: Inputs) -> Outputs:
        return self.function(inputs, **self.options)


def identity(function: Callable[..., Any]) -> tuple[str, str]:
    return function.__module__, function.__qualname__


@dataclass(frozen=True)
class Entry(Generic[Outputs]):
    """A registered function and its traits, as functions of its options."""

    function: Callable[..., Outputs]
    needs: Needs
    own_kl: Callable[[dict[str, Any]], bool] | bool
    plain_at_ratio_one: bool


class Registry(Generic[Inputs, Outputs]):
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry[Outputs]] = {}

    def names(self) -> list[str]:
        return sorted(self._entries)

    def register(
        self,
        name: str,
        needs: Needs | Iterable[str] = (),
        own_kl: Callable[[dict[str, Any]], bool] | bool = False,
        plain_at_ratio_one: bool = False,
    ) -> Callable[[Callable[..., Outputs]], Callable[..., Outputs]]:
        """`needs`: the optional columns the function reads, or a function from its options to them. `own_kl` and
        `plain_at_ratio_one`: see `Algorithm`; leave them out where they do not hold, and traces take a pass of their
        own instead of scoring wrongly."""
        fixed = () if callable(needs) else tuple(needs)
        columns: Needs = needs if callable(needs) else lambda options: fixed

        def decorate(function: Callable[..., Outputs]) -> Callable[..., Outputs]:
            known = self._entries.get(name)
            # A user's file that is imported a second time replaces what it registered.
            if known and identity(known.function) != identity(function):
                raise GradtraceError(f"The {self.kind} '{name}' is registered already: choose another name.")
            self._entries[name] = Entry(function, columns, own_kl, plain_at_ratio_one)
            return function

        return decorate

    def get(self, name: str, **options: Any) -> Algorithm[Inputs, Outputs]:
        if name not in self._entries:
            raise GradtraceError(f"There is no {self.kind} '{name}': {nearest(name, self._entries)}")
        entry = self._entries[name]
        function = entry.function
        parameters = list(inspect.signature(function).parameters.values())[1:]
        bound = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
        for option, value in options.items():
            if option not in bound:
                raise GradtraceError(f"{self.kind} '{name}' has no option '{option}': {nearest(option, bound)}")
            bound[option] = value
        missing = [option for option, value in bound.items() if value is inspect.Parameter.empty]
        if missing:
            raise GradtraceError(f"{self.kind} '{name}' needs the option '{missing[0]}', which has no default.")
        own_kl = entry.own_kl(bound) if callable(entry.own_kl) else entry.own_kl
        return Algorithm(name, function, bound, frozenset(entry.needs(bound)), own_kl, entry.plain_at_ratio_one)


policy_losses: Registry[LossInputs, LossOutputs] = Registry("policy loss")
advantages: Registry[AdvantageInputs, AdvantageOutputs] = Registry("advantage estimator")

register_policy_loss = policy_losses.register
policy_loss = policy_losses.get
policy_loss_names = policy_losses.names

register_advantage = advantages.register
advantage = advantages.get
advantage_names = advantages.names
