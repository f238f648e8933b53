"""One mini-batch at one state of training: what its tokens really do in the coming optimizer step, and what scores say.

J is the objective of the mini-batch, Σ c_t ℓ_t in nats: ℓ_t the token's log-prob, c_t what the gradient of the loss
multiplies ∇ℓ_t by at these weights (its advantage times the weight of its response, where it is on policy). So J has
the gradient that is trained with, and no clip that a step could run into.

What training on a token does is measured by brute force: two real optimizer steps with the gradient of the whole
mini-batch, in which the token weighs half as much again and half as much as it does, and the difference of J between
the two. What momentum and weight decay do is in both, and drops out. J is also taken apart into the groups' parts of
it: a token acts on its own prompt and on the others.

A float64 model is float64 inside, too (`KeepDouble`): one token's effect is smaller than float32's rounding.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from gradtrace.algorithms import LossInputs, LossOutputs, accepted
from gradtrace.attribution import InfluenceConfig, InfluenceTracer
from gradtrace.attribution.parts import TokenParts, token_parts
from gradtrace.attribution.update import second_moment_source
from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.policy.loss import fill_statistics
from gradtrace.policy.microbatch import MicroBatch, MicroBatches
from gradtrace.policy.policy import Policy

Gradient = dict[str, Tensor]
Scores = Mapping[int, Tensor]
"""Row → [T_r], one number for every token that the policy wrote; NaN where there is none."""
FREE = (BASELINE := "|A|(1−p)", "|A|·surprisal", "|A|")
"""Scores that need no gradient."""
HALF = 0.5
"""By how much of itself a token's weight is changed, up and down."""
TOKEN_BUDGET = 4096
"""Tokens of a forward and backward pass."""


def plain_surrogate(inputs: LossInputs) -> LossOutputs:
    """−A·π/π_old, without a clip."""
    return LossOutputs(-inputs.advantages * inputs.log_ratio.exp(), {})


@dataclass(eq=False)
class Trial:
    model: nn.Module
    """In float64 where that fits."""
    optimizer: torch.optim.Optimizer
    batch: RolloutBatch
    """The whole mini-batch, with advantages."""
    temperature: float = 1.0
    grad_clip: float = 0.0
    """The norm to which gradients are clipped, as training does; 0: not at all."""
    loss: Callable[[LossInputs], LossOutputs] = plain_surrogate
    """The policy loss, of which c_t is the derivative."""
    weights: Tensor | None = None
    """float64[R]: what the loss multiplies each response's terms by; None: 1 / N, N being the mini-batch's tokens."""
    original: Original | None = None
    """What model and optimizer were copied from, where they were."""
    _steps: RealSteps = field(init=False)

    def __post_init__(self) -> None:
        self._steps = RealSteps(self.model, self.optimizer, self.original)
        self.policy = Policy(self.model, next(self.model.parameters()).device, self.temperature, full_precision=True)
        batch, mask = self.batch, self.batch.response_mask
        count = int(mask.sum())
        if self.weights is None:
            self.weights = torch.full((len(batch),), 1.0 / max(count, 1), dtype=torch.float64)
        advantages = batch.need("advantages").double() * mask
        batch = batch.replace(advantages=advantages, sampler_log_probs=batch.sampler_log_probs.double())
        self.counts = batch.written_counts.tolist()
        rows = advantages.any(1).nonzero().squeeze(-1)
        """Terms of the others are 0, and so is what training on them does."""
        self.members = {g: rows[batch.group[rows] == g].tolist() for g in batch.group[rows].unique().tolist()}
        """Group → its rows, in ascending order."""
        self.rows = [r for members in self.members.values() for r in members]
        self.batch = fill_statistics(self.policy, batch, self._micro_batches(batch), rows) if len(rows) else batch
        self.factors_of_log_probs = self._factors_of_log_probs()
        self.steps_taken = 0

    def _factors_of_log_probs(self) -> Tensor:
        """float64[R, T]: c_t."""
        batch = self.batch
        if not self.rows:
            return torch.zeros(batch.response_mask.shape, dtype=torch.float64)
        assert self.weights is not None and batch.old_log_probs is not None
        log_probs = batch.old_log_probs.clone().requires_grad_()
        with torch.enable_grad():
            inputs = LossInputs(
                log_probs=log_probs,
                old_log_probs=batch.old_log_probs,
                advantages=batch.need("advantages"),
                mask=batch.response_mask,
                entropies=batch.entropies,
            )
            (slope,) = torch.autograd.grad(self.loss(inputs).loss.sum(), log_probs)
        return -slope * self.weights[:, None]

    # ------------------------------------------------------------ passes

    def _micro_batches(self, batch: RolloutBatch) -> MicroBatches:
        return MicroBatches(batch, TOKEN_BUDGET, self.policy.best_layout())

    def _passes(self, rows: list[int]) -> Iterator[tuple[MicroBatch, Tensor]]:
        """Forward passes over these rows: each with float64[r, T], every token's own term of J, 0 outside the mask."""
        for micro in self._micro_batches(self.batch)(torch.tensor(rows)):
            log_probs = micro.unflatten(self.policy.statistics(micro)[0]).double()
            factors = self.factors_of_log_probs[micro.rows, : micro.mask.shape[1]].to(log_probs.device)
            yield micro, factors * log_probs * micro.mask.to(log_probs.device)

    def terms(self, rows: list[int]) -> list[Tensor]:
        """[T_r] of each of these rows: every token's own term of J."""
        found: dict[int, Tensor] = {}
        for micro, terms in self._passes(rows):
            for index, row in enumerate(micro.rows.tolist()):
                found[row] = terms[index, micro.mask[index]]
        return [found[row] for row in rows]

    def objectives(self) -> Tensor:
        """float64[G]: of each group of `members` its part of J."""
        own = dict(zip(self.rows, self.terms(self.rows), strict=True))
        return torch.stack([torch.stack([own[r].sum() for r in rows]).sum() for rows in self.members.values()]).cpu()

    def gradient_of(self, chosen: Mapping[int, Tensor]) -> Gradient:
        """∇ of the loss of some tokens: row → bool[T_r]."""
        names, parameters = zip(*self._steps.parameters.items(), strict=True)
        total: Gradient = {}
        for micro, terms in self._passes(sorted(chosen)):
            of_rows = [terms[i, micro.mask[i]][chosen[r].to(terms.device)] for i, r in enumerate(micro.rows.tolist())]
            found = torch.autograd.grad(-torch.cat(of_rows).sum(), parameters, allow_unused=True)
            for name, own in zip(names, found, strict=True):
                if own is not None:
                    total[name] = total[name].add_(own) if name in total else own
        return total

    @cached_property
    def _gradient_and_factor(self) -> tuple[Gradient, float]:
        found = self.gradient_of({r: torch.ones(self.counts[r], dtype=torch.bool) for r in self.rows})
        norm = math.sqrt(sum(float(own.double().square().sum()) for own in found.values()))
        factor = min(1.0, self.grad_clip / (norm + 1e-6)) if self.grad_clip else 1.0  # as clip_grad_norm_ does
        return {name: factor * own for name, own in found.items()}, factor

    @property
    def gradient(self) -> Gradient:
        """∇ of the loss of the mini-batch, clipped."""
        return self._gradient_and_factor[0]

    @property
    def clip_factor(self) -> float:
        """Return the factor by which clipping scales the gradient."""
        return self._gradient_and_factor[1]

    @property
    def is_first_step(self) -> bool:
        """Adam's state is empty: its step is like the gradient's sign."""
        return second_moment_source(self.model, self.optimizer, self.gradient) == "batch_gradient"

    # ------------------------------------------------------------ what real steps do

    def effect(self, chosen: Mapping[int, Tensor]) -> Tensor:
        """float64[G]: what training on these tokens does to each group's part of J. The gradient is clipped by the same
        factor whatever they weigh: were it clipped anew, more weight for one token would be less for all others."""
        own = self.gradient_of(chosen)
        ends = []
        for half in (HALF * self.clip_factor, -HALF * self.clip_factor):
            changed = {
                name: whole + half * own[name] if name in own else whole for name, whole in self.gradient.items()
            }
            ends.append(self._steps.effect(changed, self.objectives))
        self.steps_taken += 1
        return (ends[0] - ends[1]) / (2 * HALF)

    @cached_property
    def done(self) -> dict[int, Tensor]:
        """Row → float64[T_r]: the change of each token's own term of J by the real step, less what momentum and weight
        decay do alone."""
        after, idle = (
            self._steps.effect(gradient, lambda: torch.cat(self.terms(self.rows)).cpu())
            for gradient in (self.gradient, {name: torch.zeros_like(own) for name, own in self.gradient.items()})
        )
        return dict(zip(self.rows, (after - idle).split([self.counts[r] for r in self.rows]), strict=True))

    # ------------------------------------------------------------ what scores say

    def parts(self, groups: list[int] | None = None) -> TokenParts:
        """The product's score of every token of `rows`, in this order; of `groups` also the one in the objective of
        their own prompt."""
        place = {r: index for index, r in enumerate(self.rows)}
        measured = {g: [place[r] for r in self.members[g]] for g in groups or ()}
        with self._gradient_in_place():
            terms = lambda: [-own for own in self.terms(self.rows)]  # noqa: E731
            return token_parts(self.model, self.optimizer, terms, clip_factor=self.clip_factor, measured=measured)

    @contextlib.contextmanager
    def _gradient_in_place(self) -> Iterator[None]:
        """Inside, `.grad` is the clipped gradient of the mini-batch."""
        parameters = self._steps.parameters
        kept = {name: p.grad for name, p in parameters.items()}
        for name, p in parameters.items():
            p.grad = self.gradient[name].clone() if name in self.gradient else None
        try:
            yield
        finally:
            for name, p in parameters.items():
                p.grad = kept[name]

    def influence(self) -> dict[int, Tensor]:
        """Row → the tokens' parts in the mini-batch's objective."""
        return dict(zip(self.rows, self.parts().tokens, strict=True))

    def influence_own(self, groups: list[int]) -> dict[int, Tensor]:
        """The same in the objective of their own prompt."""
        found = self.parts(groups).measured.values()
        return {self.rows[place]: own for one in found for place, own in zip(one.responses, one.tokens, strict=True)}

    def factors(self, config: InfluenceConfig) -> dict[int, Tensor]:
        """Scores from captured factors, by backward passes of the loss, one for each group."""
        assert self.weights is not None and self.batch.advantages is not None
        rows, size = self.rows, [self.counts[r] for r in self.rows]
        place = {r: index for index, r in enumerate(rows)}
        advantages = self.batch.advantages[rows].sum(1) / torch.tensor(size)
        weights, group = self.weights[rows], self.batch.group[rows]
        good = advantages > 0 if self.batch.rewards is None else accepted(self.batch.rewards, self.batch.group)[rows]
        of_log_probs = None if config.about == "output_function" else -1.0 / (weights * advantages)
        kept = {p: p.grad for p in self._steps.parameters.values()}
        try:
            self.model.zero_grad()
            with InfluenceTracer(self.model, config=config, optimizer=self.optimizer) as tracer:
                for members in self.members.values():
                    micro = MicroBatches(self.batch, 1, "padded").sequences.padded(torch.tensor(members))
                    with tracer.capture(
                        response=torch.tensor([place[r] for r in members]),
                        tokens=micro.tokens,
                        accepted=good,
                        group=group,
                        advantages=advantages,
                        scale=-1.0 / weights,
                        target_scale=of_log_probs,
                        sign=None if of_log_probs is not None else advantages.sign(),
                        positions=self.policy.seen_by_head(micro),
                    ):
                        log_probs, _ = self.policy.statistics(micro)
                        terms = advantages[[place[r] for r in members], None] * micro.unflatten(log_probs)
                        (-(terms * self.weights[members, None])).sum().backward()
                for parameter in kept:
                    if parameter.grad is not None:
                        parameter.grad.mul_(self.clip_factor)
                trace = tracer.score(terms=lambda some: self._raised([rows[i] for i in some]), coming=True)
        finally:
            for parameter, gradient in kept.items():
                parameter.grad = gradient
        return {r: trace.token_scores[index].double().cpu() for index, r in enumerate(rows)}

    def _raised(self, rows: list[int]) -> Tensor:
        """[N]: A ℓ of every token, what a step on it raises, apart from the normaliser."""
        assert self.batch.advantages is not None
        found: dict[int, Tensor] = {}
        for micro in self._micro_batches(self.batch)(torch.tensor(rows)):
            log_probs = micro.unflatten(self.policy.statistics(micro)[0])
            for index, row in enumerate(micro.rows.tolist()):
                mask = micro.mask[index]
                found[row] = log_probs[index, mask] * self.batch.advantages[row, : len(mask)][mask].to(log_probs)
        return torch.cat([found[row] for row in rows])

    def baselines(self) -> dict[str, dict[int, Tensor]]:
        """Scores that need no gradient: row → [T_r]."""
        assert self.batch.old_log_probs is not None and self.batch.advantages is not None
        found: dict[str, dict[int, Tensor]] = {name: {} for name in FREE}
        for r in self.rows:
            mask = self.batch.response_mask[r]
            size, log_probs = self.batch.advantages[r, mask].abs(), self.batch.old_log_probs[r, mask]
            for name, factor in zip(FREE, (1 - log_probs.exp(), -log_probs, torch.ones_like(log_probs)), strict=True):
                found[name][r] = size * factor
        return found


SMALL_MODEL = 50_000_000
"""Parameters below which a copy in float64 costs little."""
OF_A_DEVICE = ("params", "fused", "foreach", "capturable", "decoupled_weight_decay")
"""Keys of a parameter group that a copy does not take over."""


def working_copy(
    model: nn.Module, optimizer: torch.optim.Optimizer, precision: str = "auto"
) -> tuple[nn.Module, torch.optim.Optimizer, Original | None]:
    """Model and optimizer to take steps with, and what they were copied from; None where they are the given ones.

    `precision`: float32, float64, or auto, which is float64 for small models. Weights in half precision are copied
    into at least float32: one step moves most of them by less than they can hold."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps the one that steps
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    check(trained, optimizer)
    small = sum(p.numel() for p in trained.values()) < SMALL_MODEL
    wanted = torch.float64 if precision == "float64" or (precision == "auto" and small) else torch.float32
    if {p.dtype for p in trained.values()} <= {wanted, torch.float64}:
        return model, optimizer, None
    own = copy.deepcopy(model).to(wanted)
    names = {p: name for name, p in trained.items()}
    made = optimizer_like(
        type(optimizer),
        own,
        optimizer.param_groups,
        [[names[p] for p in group["params"] if p in names] for group in optimizer.param_groups],
        {name: optimizer.state.get(p, {}) for name, p in trained.items()},
    )
    return own, made, (model, optimizer)


def check(trained: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Refuse weights and states that cannot be stepped and put back."""
    if not trained:
        raise GradtraceError("every parameter of the model is frozen (requires_grad=False): no step can move it")
    for name, p in trained.items():
        if hasattr(p, "device_mesh") or p.is_meta:
            raise GradtraceError(
                f"{name} is a shard of a weight: verify needs all of it in one process. Save a checkpoint and run "
                "`gradtrace verify CHECKPOINT`"
            )
    known = {p for group in optimizer.param_groups for p in group["params"]}
    if unknown := [name for name, p in trained.items() if p not in known]:
        raise GradtraceError(
            f"the optimizer does not know {unknown[0]} ({len(unknown)} such): give the one that trains this model"
        )
    for p, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != p.shape:
                raise GradtraceError(
                    f"{type(optimizer).__name__} keeps {key} as {tuple(value.shape)} for a parameter of "
                    f"{tuple(p.shape)} (quantised or factored): verify knows optimizers whose state has the shape of "
                    "their parameters"
                )


def optimizer_like(
    kind: type[torch.optim.Optimizer],
    model: nn.Module,
    groups: list[dict[str, Any]],
    names: list[list[str]],
    state: Mapping[str, Mapping[str, Any]],
) -> torch.optim.Optimizer:
    """An optimizer for a copy of a model in another precision, with the groups and the state of the original's."""
    parameters = dict(model.named_parameters())
    made = [
        {**{k: v for k, v in group.items() if k not in OF_A_DEVICE}, "params": [parameters[n] for n in some]}
        for group, some in zip(groups, names, strict=True)
        if some
    ]
    optimizer = kind(made)  # type: ignore[call-arg]
    for name, found in state.items():
        p = parameters[name]
        if found:
            optimizer.state[p] = {key: in_precision(value, p) for key, value in found.items()}
    return optimizer


def in_precision(value: Any, parameter: Tensor) -> Any:
    """A value of the optimizer's state, a copy in the precision of its parameter; counts stay as they are."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().to(parameter.dtype if value.dim() else value.dtype)


Original = tuple[nn.Module, torch.optim.Optimizer]
"""The model and the optimizer that a working copy was made of."""


class RealSteps:
    """Takes steps of an optimizer from one state, again and again; all that it moves comes back bit by bit."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        original: Original | None = None,
    ) -> None:
        """`original`: where weights and state come back from; without it they are kept, which takes a copy of them."""
        self.optimizer = optimizer
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._gradients = {name: p.grad for name, p in self.parameters.items()}
        owner, owned_by = original or (model, optimizer)
        own = dict(owner.named_parameters())

        def kept(value: Any) -> Any:
            return value.detach().clone() if isinstance(value, Tensor) and original is None else value

        self._weights = {name: kept(own[name]) for name in self.parameters}
        self._state: dict[str, dict[str, Any]] = {
            name: {key: kept(value) for key, value in owned_by.state.get(own[name], {}).items()}
            for name in self.parameters
        }

    def effect(self, gradient: Mapping[str, Tensor], measure: Callable[[], Tensor]) -> Tensor:
        """`measure()` at the weights that a step with this gradient leads to; parameters it leaves out have a gradient
        of zero, so that momentum moves them as it would."""
        for name, p in self.parameters.items():
            found = gradient.get(name)
            p.grad = torch.zeros_like(p) if found is None else found.detach().to(p.dtype)
        try:
            self.optimizer.step()
            with torch.no_grad():
                return measure()
        finally:
            self.restore()

    @torch.no_grad()
    def restore(self) -> None:
        for name, p in self.parameters.items():
            p.grad = self._gradients[name]
            p.copy_(self._weights[name])
            if not self._state[name]:
                self.optimizer.state.pop(p, None)
                continue
            state = self.optimizer.state[p]
            for key, value in self._state[name].items():
                if isinstance(value, Tensor):
                    state[key].copy_(value)
                else:
                    state[key] = value
