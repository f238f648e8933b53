"""Parts: what this step does to every token's own term of the loss, from one forward pass.

Let J be minus the loss of the mini-batch as it is trained: the sum of all tokens' own terms, with ratio, clip, KL,
weights and normaliser. Let d be what this mini-batch's gradient contributes to the coming optimizer step, over all
parameters: for AdamW −lr·(1−β₁)/(1−β₁ᵏ)·g/(√v̂+ε), with v̂ as the step will see it. **A token's part is the change of its
own term of J from θ to θ + d**, in nats of J; positive = the step raises it.

A part has two readings, which agree to first order because Adam's division is symmetric: what the step did to this
token, and what training on this token did for J. The parts of a group add up to what the batch's gradient did to the
group, all parts to what it did to J. What momentum and weight decay do is not in them.

`measure` asks another question of a few groups: what did training on this token do for *its own prompt*? There d is
what the gradient of the group's own terms contributes to the step, divided by the same √v̂+ε. These directions of all
groups add up to d.

How: update.py gives d weight by weight, tangent.py moves the weights along it and puts them back, and the terms are
computed before and in between. No second copy of the weights exists but the one they are restored from.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from gradtrace.attribution.collectives import Ranks, is_sharded, local
from gradtrace.attribution.errors import AttributionError
from gradtrace.attribution.geometry import Source, unwrapped
from gradtrace.attribution.tangent import directional_derivative, has_low_precision, moved
from gradtrace.attribution.update import learning_rate, second_moment_source, step_direction

OwnTerms = Callable[[], Sequence[Tensor]]
"""Runs the model: every response's own terms of the loss, one tensor [T_r] per response, on all calls alike."""
WRONG = 0.05
"""By how much the change of all terms may differ from the slope of the loss: along the step or, as that may bend …"""
SHORT = 0.05
"""… along this part of it, or a tenth of that."""


@dataclass(frozen=True, eq=False)
class GroupParts:
    """The parts of one group's tokens in the objective of their own prompt."""

    responses: list[int]
    """Those of the group."""
    tokens: list[Tensor]
    """float64[T_r] for each of them."""


@dataclass(frozen=True, eq=False)
class TokenParts:
    """The parts of a mini-batch's tokens."""

    tokens: list[Tensor]
    """float64[T_r] per response: the change of each token's own term of J by this batch's gradient, in nats."""
    second_moment: Source
    """Where v̂ came from. `batch_gradient`: the optimizer's state is empty, and the step is like the gradient's sign.
    Parts then say what the step did to a token, and not what training on the token did."""
    moved: bool
    """False: the learning rate is 0 (warm-up), no weight moves, and all parts are 0."""
    clip_factor: float
    """What clipping multiplied the gradient by; found out from the terms where it was not given."""
    measured: dict[int, GroupParts] = field(default_factory=dict)
    """Of `measure` groups, by the group's id."""

    @property
    def responses(self) -> Tensor:
        """float64[R]: of each response."""
        return torch.stack([own.sum() for own in self.tokens])

    @property
    def total(self) -> float:
        """The change of J."""
        return float(self.responses.sum())

    def of_groups(self, group: Tensor) -> dict[int, float]:
        """Group → the change of its part of J; `group` is long[R]."""
        found: dict[int, float] = {}
        for name, value in zip(group.tolist(), self.responses.tolist(), strict=True):
            found[name] = found.get(name, 0.0) + value
        return found


def token_parts(
    model: nn.Module,
    optimizer: Any,
    terms: OwnTerms,
    *,
    clip_factor: float | None = None,
    measured: Mapping[int, list[int]] | None = None,
    ranks: Ranks | None = None,
) -> TokenParts:
    """The parts of this mini-batch's tokens, after `loss.backward()` and clipping, before `optimizer.step()`.

    `terms` runs the model and returns each response's own terms of the loss whose gradient is in `.grad`; together
    they sum to that loss. `clip_factor`: what clipping has multiplied the gradient by. `measured`: groups whose parts
    in their own prompt's objective are wanted, and this process's responses of each. Weights, gradients and the
    optimizer's state stay as they are, bit by bit.
    """
    gradient, measured = own_gradient(model, optimizer), dict(measured or {})
    source = second_moment_source(model, optimizer, gradient)
    step = ComingStep(model, optimizer, gradient, terms, ranks or Ranks())
    lost = step.change_of_terms()
    if not lost.slope:
        still = [torch.zeros_like(own) for own in step.base]
        own = {group: GroupParts(rows, [still[row] for row in rows]) for group, rows in measured.items()}
        return TokenParts(still, source, moved=False, clip_factor=1.0, measured=own)
    factor = check_terms(step, lost, clip_factor)
    found = TokenParts([-own for own in lost.terms], source, moved=True, clip_factor=factor)
    for group, rows in measured.items():
        changes = step.change_of_terms(of=step.gradient_of(rows, factor)).terms
        found.measured[group] = GroupParts(rows, [-changes[row] for row in rows])
    return found


def groups_in_turn(group: Tensor, measure: int, turn: int, ranks: Ranks) -> dict[int, list[int]]:
    """`measure` of the groups, the following ones in the next turn, and this process's responses of each."""
    names = sorted(set().union(*ranks.gather(set(group.tolist()))))
    first = turn * measure % len(names) if names else 0
    chosen = (names[first:] + names[:first])[:measure]
    return {name: (group == name).nonzero().squeeze(-1).tolist() for name in chosen}


def own_gradient(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """What stands in `.grad`, by name of the parameter; an error if the optimizer would not step along it."""
    parameters = dict(model.named_parameters())
    gradient = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    if not gradient:
        raise AttributionError("no parameter has a gradient: call this after loss.backward(), before zero_grad()")
    known = {id(p) for group in unwrapped(optimizer).param_groups for p in group["params"]}
    foreign = [name for name in gradient if id(parameters[name]) not in known]
    if foreign:
        raise AttributionError(
            f"the optimizer does not own {len(foreign)} of the {len(gradient)} parameters that have a gradient, such as"
            f" {foreign[0]}: pass the optimizer that trains this model"
        )
    bad = next((name for name, own in gradient.items() if not bool(local(own).isfinite().all())), None)
    if bad is not None:
        raise AttributionError(f"the gradient of {bad} is not finite: this step would destroy the weights")
    return gradient


@dataclass(frozen=True, eq=False)
class Change:
    """What moving the weights along a direction does."""

    terms: list[Tensor]
    """float64[T_r] per response: to each term of the loss."""
    slope: float
    """To first order, to the loss whose gradient is in `.grad`; over all ranks."""
    total: float
    """The sum of `terms`, over all ranks."""

    @property
    def ratio(self) -> float:
        """Near 1 where the terms add up to the loss."""
        return self.total / self.slope if self.slope else math.nan


@dataclass(eq=False)
class ComingStep:
    """What the coming step of the optimizer, or a part of it, does to every term of the loss."""

    model: nn.Module
    optimizer: Any
    gradient: Mapping[str, Tensor]
    terms: OwnTerms
    ranks: Ranks

    def change_of_terms(
        self, of: Mapping[str, Tensor] | None = None, fraction: float = 1.0, every_other: bool = False
    ) -> Change:
        """Along what the gradient, or the part `of` it, contributes to the step, or along a `fraction` of that; or
        along `every_other` parameter's part. In forward mode where weights are too coarse for a difference."""
        slopes = [0.0]
        base = self.base
        if not learning_rate(self.optimizer):
            return Change([torch.zeros_like(own) for own in base], 0.0, 0.0)

        def direction() -> Iterator[tuple[str, Tensor]]:
            names = sorted(self.gradient)[::2] if every_other else self.gradient
            for name, step in step_direction(self.model, self.optimizer, self.gradient, of):
                if name in names:
                    slopes.append(fraction * self.ranks.own_part(self.gradient[name], step))
                    yield name, step

        if has_low_precision(self.model):
            derivative = directional_derivative(self.model, lambda: torch.cat(list(self.terms())), dict(direction()))
            changes = list((fraction * derivative.double().cpu()).split([len(own) for own in base]))
        else:
            with moved(self.model, direction(), fraction):
                after = self._terms()
            if [len(own) for own in after] != [len(own) for own in base]:
                raise AttributionError(
                    "terms() gave other numbers of tokens when it was called again: it must not draw"
                )
            changes = [new - old for new, old in zip(after, base, strict=True)]
        own = (math.fsum(slopes), float(sum(change.sum() for change in changes)))
        slope, total = (math.fsum(column) for column in zip(*self.ranks.gather(own), strict=True))
        return Change(changes, slope, total)

    @cached_property
    def base(self) -> list[Tensor]:
        """The terms at the weights as they are."""
        return self._terms()

    def _terms(self) -> list[Tensor]:
        with torch.no_grad():
            return [own.detach().double().cpu() for own in self.terms()]

    def gradient_of(self, rows: Sequence[int], factor: float) -> dict[str, Tensor]:
        """What these responses' terms brought to `.grad`, by one backward pass that leaves it alone; `factor` is what
        clipping has multiplied it by."""
        if is_sharded(self.model):
            raise AttributionError(
                "measure: the gradient of one group cannot be had outside of training where weights are sharded. Leave"
                " measure out, or use the influence trace of verl or TRL"
            )
        parameters = dict(self.model.named_parameters())
        wanted = [parameters[name] for name in self.gradient]
        found = [torch.zeros_like(p) for p in wanted]
        if rows:
            with torch.enable_grad():
                own = self.terms()
                loss = torch.stack([own[row].sum() for row in rows]).sum()
                parts = torch.autograd.grad(factor * loss, wanted, allow_unused=True)
            found = [zero if part is None else part for zero, part in zip(found, parts, strict=True)]
        return {name: self.ranks.sum(part) for name, part in zip(self.gradient, found, strict=True)}


def check_terms(step: ComingStep, lost: Change, clip_factor: float | None) -> float:
    """Raise unless the terms add up to the loss whose gradient is in `.grad`. Returns what clipping has multiplied that
    gradient by; where it is not given, terms that are too large by one factor in all directions tell it."""
    wanted = 1.0 / (clip_factor or 1.0)
    if abs(lost.ratio / wanted - 1.0) < WRONG:
        return 1.0 / wanted
    found = math.nan
    for fraction in (SHORT, SHORT / 10):  # one token of p = 1e-5 can bend the sum within a twentieth of the step
        found = step.change_of_terms(fraction=fraction).ratio
        if abs(found / wanted - 1.0) < WRONG:
            return 1.0 / wanted
    if clip_factor is None and found > 1.0:
        half = step.change_of_terms(fraction=SHORT / 10, every_other=True)
        if abs(half.ratio / found - 1.0) < 2 * WRONG:
            warnings.warn(
                f"the terms add up to {found:.3g} times the loss whose gradient is in .grad. After clipping that is"
                f" right, and clipping multiplied it by {1 / found:.3g}: pass clip_factor= to have it checked."
                " Otherwise divide the terms by the normaliser of the loss",
                stacklevel=4,
            )
            return 1.0 / found
    raise AttributionError(
        f"the terms do not add up to the loss whose gradient is in .grad: along the coming step they change {found:.3g}"
        f" times as much, and {wanted:.3g} times was expected. They must be each response's own terms of that loss,"
        " weights and normaliser included, at the response's tokens and not at the positions that predict them"
    )
