"""Algorithms by name, so that a config can choose one and a user can add one.

@register_policy_loss("reinforce")
def reinforce(inputs: LossInputs, *, scale: float = 1.0) -> LossOutputs:
    return LossOutputs(-scale * inputs.advantages * inputs.log_probs)

loss = policy_loss("reinforce", scale=0.5)      # names and options are checked here, before any work
outputs = loss(LossInputs(...))

Shapes everywhere in this package: R responses, T the longest of them. Token columns are float[R, T] and `mask` is
bool[R, T], as in `RolloutBatch`. Inputs set their padding to zero when they are built, so no algorithm has to remember
that NaN may stand in it.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from gradtrace.errors import GradtraceError


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with zeros outside the mask. Multiplying by the mask would keep a NaN; selecting does not."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_column(name: str, values: Tensor, mask: Tensor) -> Tensor:
    """`values` with zero padding; columns of one batch must have the mask's shape."""
    if values.shape != mask.shape:
        raise ValueError(f"{name} is {tuple(values.shape)}, the mask is {tuple(mask.shape)}")
    return masked(values, mask)


def required(column: Tensor | None, name: str, by: str) -> Tensor:
    """An optional column that this algorithm, with these options, cannot do without."""
    if column is None:
        raise GradtraceError(f"{by} needs {name}, and the batch has none: compute them, or choose another.")
    return column


def straight_through(weight: Tensor, log_probs: Tensor) -> Tensor:
    """Value `weight`, gradient weight · ∇log π: what a ratio of that size would have."""
    return weight.detach() * (log_probs - log_probs.detach()).exp()


def check_rewards(rewards: Tensor, group: Tensor) -> None:
    """Rewards float[R] and groups long[R] must align, and every reward must be a number."""
    if rewards.dim() != 1 or rewards.shape != group.shape:
        raise ValueError(f"rewards are {tuple(rewards.shape)}, groups {tuple(group.shape)}: both must be [R]")
    if not bool(torch.isfinite(rewards).all()):
        row = int((~torch.isfinite(rewards)).nonzero()[0])
        raise GradtraceError(
            f"The reward of response {row} (group {int(group[row])}) is {float(rewards[row])}. It would "
            "spoil the advantages of its whole group: make the reward function return a finite number."
        )


@dataclass
class AdvantageInputs:
    rewards: Tensor
    """float[R]: one reward per response, given at its last token."""
    group: Tensor
    """long[R]: responses to the same prompt have the same number."""
    mask: Tensor
    """bool[R, T]."""
    values: Tensor | None = None
    """float[R, T]: the critic's estimate *before* each token (gae)."""
    old_log_probs: Tensor | None = None
    """float[R, T]: for a KL penalty inside the reward."""
    ref_log_probs: Tensor | None = None
    """float[R, T]: for a KL penalty inside the reward."""

    def __post_init__(self) -> None:
        check_rewards(self.rewards, self.group)
        if self.mask.dtype != torch.bool or self.mask.shape[:1] != self.rewards.shape:
            raise ValueError(f"mask must be bool[R, T] with R = {len(self.rewards)}, is {self.mask.shape}")
        for name in ("values", "old_log_probs", "ref_log_probs"):
            if getattr(self, name) is not None:
                setattr(self, name, masked_column(name, getattr(self, name), self.mask).detach())


@dataclass
class AdvantageOutputs:
    advantages: Tensor
    """float[R, T], zero outside the mask."""
    returns: Tensor | None = None
    """float[R, T], zero outside the mask: the critic's targets, where the estimator has a critic."""


@dataclass
class LossInputs:
    log_probs: Tensor
    """float[R, T]: log-probs of the sampled tokens under the policy being trained; carries the gradient."""
    old_log_probs: Tensor
    """float[R, T]: the same before this step's first update."""
    advantages: Tensor
    """float[R, T]."""
    mask: Tensor
    """bool[R, T]."""
    ref_log_probs: Tensor | None = None
    """float[R, T]: under the frozen reference policy (losses with a KL term of their own)."""
    entropies: Tensor | None = None
    """float[R, T]: current entropy of the distribution each token was drawn from (archer)."""

    def __post_init__(self) -> None:
        if self.mask.dtype != torch.bool:
            raise ValueError(f"mask must be bool[R, T], is {self.mask.dtype}")
        for name in ("log_probs", "old_log_probs", "advantages", "ref_log_probs", "entropies"):
            values = getattr(self, name)
            if values is not None:
                # only the policy moves: on policy the same tensor may be given as log_probs and old_log_probs
                values = values if name in ("log_probs", "entropies") else values.detach()
                setattr(self, name, masked_column(name, values, self.mask))

    @property
    def log_ratio(self) -> Tensor:
        """float[R, T]: log π/π_old, held within ±20 so that its exponential stays finite in float32."""
        return (self.log_probs - self.old_log_probs).clamp(-20.0, 20.0)

    def clip_metrics(self, was_clipped: Tensor) -> dict[str, Tensor]:
        """What every loss reports that clips the ratio at some tokens, bool[R, T]."""
        log_ratio = self.log_ratio.detach()
        return {"actor/pg_clipfrac": was_clipped.to(log_ratio.dtype), "actor/ppo_kl": -log_ratio}


@dataclass
class LossOutputs:
    loss: Tensor
    """float[R, T]: to be *minimised*, per token, zero outside the mask. `aggregate` makes a scalar of it."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Name → float[R, T] without gradient, zero outside the mask. Per token, so that micro-batches
    add up: the mini-batch's metric is their sum over the mini-batch's number of tokens."""

    def metric_sums(self) -> dict[str, Tensor]:
        """Name → scalar: sum over this micro-batch's tokens."""
        return {name: values.sum() for name, values in self.metrics.items()}


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


@dataclass(frozen=True)
class Registration(Generic[Outputs]):
    """A registered function and its traits, as functions of its options."""

    function: Callable[..., Outputs]
    needs: Needs
    own_kl: Callable[[dict[str, Any]], bool] | bool
    plain_at_ratio_one: bool


class Registry(Generic[Inputs, Outputs]):
    def __init__(self, kind: str, modules: Sequence[str] = ()) -> None:
        """`modules` register what ships with gradtrace; they are imported at the first look."""
        self.kind = kind
        self.modules = modules
        self._entries: dict[str, Registration[Outputs]] = {}

    def entries(self) -> dict[str, Registration[Outputs]]:
        """Everything that is registered, by name."""
        for module in self.modules:
            importlib.import_module(module)
        return self._entries

    def names(self) -> list[str]:
        return sorted(self.entries())

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
            ours = str(function.__module__).startswith("gradtrace.")
            known = (self._entries if ours else self.entries()).get(name)  # ours are taken before anybody looks
            # A user's file that is imported a second time replaces what it registered.
            name_here = (function.__module__, function.__qualname__)
            if known and (known.function.__module__, known.function.__qualname__) != name_here:
                raise GradtraceError(f"The {self.kind} '{name}' is registered already: choose another name.")
            self._entries[name] = Registration(function, columns, own_kl, plain_at_ratio_one)
            return function

        return decorate

    def get(self, name: str, **options: Any) -> Algorithm[Inputs, Outputs]:
        entries = self.entries()
        if name not in entries:
            raise GradtraceError(f"There is no {self.kind} '{name}': {nearest(name, entries)}")
        entry = entries[name]
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


policy_losses: Registry[LossInputs, LossOutputs] = Registry("policy loss", ["gradtrace.algorithms.losses"])
advantages: Registry[AdvantageInputs, AdvantageOutputs] = Registry(
    "advantage estimator", ["gradtrace.algorithms.advantages"]
)

register_policy_loss = policy_losses.register
policy_loss = policy_losses.get
policy_loss_names = policy_losses.names

register_advantage = advantages.register
advantage = advantages.get
advantage_names = advantages.names


def import_file(file: Path, setting: str) -> ModuleType:
    """Import a Python file of the user's; `setting` is KEY=VALUE that names it, for messages."""
    if not file.is_file():
        raise GradtraceError(f"{setting}: there is no file {file.absolute()}.")
    spec = importlib.util.spec_from_file_location(f"gradtrace_user_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise GradtraceError(f"{setting}: {file} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise GradtraceError(f"{setting}: importing {file} raised {type(error).__name__}: {error}") from error
    return module


def import_algorithms(path: str) -> None:
    """Import the file of `algorithm.path`, which registers policy losses, advantages or both."""
    module = import_file(Path(path), f"algorithm.path={path}")
    functions: list[Callable[..., Any]] = [entry.function for entry in policy_losses.entries().values()]
    functions += [entry.function for entry in advantages.entries().values()]
    if not any(function.__module__ == module.__name__ for function in functions):
        raise GradtraceError(
            f"algorithm.path={path}: the file registers no policy loss and no advantage. Decorate a function with "
            "@register_policy_loss(NAME) or @register_advantage(NAME) of gradtrace.algorithms."
        )
    _imported.add(path)


def is_imported(path: str) -> bool:
    """Whether `import_algorithms` has imported the file in this process."""
    return path in _imported


_imported: set[str] = set()
