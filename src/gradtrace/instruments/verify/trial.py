"""One mini-batch at one state of training: what steps on parts of it really do, and what every score says they do.

The step of a token is its term of the policy gradient at the weights that sampled it, A_r ℓ_t / N with N the tokens
of the mini-batch. What is measured is a group's contrast, the mean of its accepted responses' mean log-probs minus
that of the rejected ones, after a real optimizer step on the chosen tokens alone, minus the same after a step with a
zero gradient: momentum and weight decay move the weights, too, and are not the tokens' doing.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradtrace.attribution import InfluenceConfig, InfluenceTracer
from gradtrace.attribution.factors.result import InfluenceTrace
from gradtrace.errors import GradtraceError
from gradtrace.policy.policy import KeepDouble

Gradient = dict[str, Tensor]
FREE = (BASELINE := "|A|(1−p)", "|A|·surprisal", "|A|")
"""Scores that need no gradient."""


@dataclass(eq=False)
class Trial:
    model: nn.Module
    """In float64 where that fits: the effect of one token's step is smaller than float32's rounding."""
    optimizer: torch.optim.Optimizer
    sequences: list[Tensor]
    """long[S_r]: prompt and response."""
    prompt_lengths: list[int]
    group: Tensor
    """long[R]"""
    accepted: Tensor
    """bool[R]"""
    advantages: Tensor
    """float[R]"""
    temperature: float = 1.0
    grad_clip: float = 0.0
    tokens: int = 0
    """N, the tokens of the mini-batch that training would take; 0: those of the responses that are here."""
    original: Original | None = None
    """What model and optimizer were copied from, where they were."""
    written: list[Tensor] | None = None
    """Of each response which tokens the policy wrote, T_r of them; None: all."""
    step_terms: Callable[[list[int]], list[Tensor]] | None = None
    """Responses → [T_r] each: what training raises, token by token, where that is more than A ℓ_t."""
    _steps: RealSteps = field(init=False)

    def __post_init__(self) -> None:
        self._steps = RealSteps(self.model, self.optimizer, self.grad_clip, self.original)
        self._idle: dict[tuple[int, ...], Tensor] = {}
        after = [len(s) - p for s, p in zip(self.sequences, self.prompt_lengths, strict=True)]
        self.masks = self.written or [torch.ones(length, dtype=torch.bool) for length in after]
        self.lengths = [int(mask.sum()) for mask in self.masks]
        self.tokens = self.tokens or sum(self.lengths)
        mixed = [g for g in self.group.unique().tolist() if self.accepted[self.group == g].unique().numel() == 2]
        self.members = {g: (self.group == g).nonzero().squeeze(-1).tolist() for g in mixed}
        """Of the groups that have a contrast."""
        self.steps_taken = 0

    @property
    def responses(self) -> list[int]:
        """Those of the groups that have a contrast."""
        return [r for members in self.members.values() for r in members]

    def keep(self, groups: list[int]) -> None:
        """Only these groups are scored and measured from now on; the step's normaliser stays that of the
        mini-batch."""
        self.members = {g: self.members[g] for g in groups}

    # ------------------------------------------------------------ passes

    def log_probs(self, responses: list[int]) -> list[Tensor]:
        """The log-probs of each response's tokens, one tensor [T_r] per response."""
        ids, tokens = self._padded(responses)
        first = next(self.model.parameters())
        with KeepDouble() if first.dtype == torch.float64 else contextlib.nullcontext():
            logits = self.model(input_ids=ids.to(first.device), use_cache=False).logits
            chosen = logits[:, :-1][tokens[:, 1:].to(first.device)] / self.temperature
            found = torch.log_softmax(chosen, -1).gather(-1, ids[tokens][:, None].to(first.device)).squeeze(-1)
        return list(found.split([self.lengths[r] for r in responses]))

    def _padded(self, responses: list[int]) -> tuple[Tensor, Tensor]:
        """ids and where the policy wrote them, [B, S]. Padding on the right is 0: nothing before it sees it."""
        longest = max(len(self.sequences[r]) for r in responses)
        ids = torch.zeros(len(responses), longest, dtype=torch.long)
        tokens = torch.zeros(len(responses), longest, dtype=torch.bool)
        for i, r in enumerate(responses):
            ids[i, : len(self.sequences[r])] = self.sequences[r]
            tokens[i, self.prompt_lengths[r] : len(self.sequences[r])] = self.masks[r]
        return ids, tokens

    def contrasts(self, groups: list[int]) -> Tensor:
        """[G]: of each group."""
        responses = [r for g in groups for r in self.members[g]]
        means = dict(zip(responses, (values.mean() for values in self.log_probs(responses)), strict=True))
        found = []
        for g in groups:
            good = [means[r] for r in self.members[g] if self.accepted[r]]
            bad = [means[r] for r in self.members[g] if not self.accepted[r]]
            found.append(torch.stack(good).mean() - torch.stack(bad).mean())
        return torch.stack(found)

    # ------------------------------------------------------------ what real steps do

    def effect(self, gradient: Gradient, groups: list[int]) -> float:
        """The change of the sum of the groups' contrasts by a step along the gradient, without momentum's own."""
        key = tuple(groups)
        if key not in self._idle:
            self._idle[key] = self._steps.effect({}, lambda: self.contrasts(groups)).double()
        found = self._steps.effect(gradient, lambda: self.contrasts(groups)).double()
        self.steps_taken += 1
        return float((found - self._idle[key]).sum())

    def subset_gradient(self, chosen: dict[int, Tensor]) -> Gradient:
        """Of the loss of some tokens: response → bool[T_r]."""
        responses = [r for r, mask in chosen.items() if bool(mask.any())]
        if not responses:
            return {}
        own = zip(responses, self._raised(responses), strict=True)
        terms = [-values[chosen[r].to(values.device)].sum() / self.tokens for r, values in own]
        names, weights = zip(*self._steps.parameters.items(), strict=True)
        found = torch.autograd.grad(torch.stack(terms).sum(), weights, allow_unused=True)
        return {name: g for name, g in zip(names, found, strict=True) if g is not None}

    def _raised(self, responses: list[int]) -> list[Tensor]:
        """What a step raises, [T_r] for each response: A ℓ_t, or what the host says."""
        if self.step_terms is not None:
            return self.step_terms(responses)
        return [
            float(self.advantages[r]) * values for r, values in zip(responses, self.log_probs(responses), strict=True)
        ]

    # ------------------------------------------------------------ what scores say

    def traced(self, config: InfluenceConfig, coming: bool = True) -> InfluenceTrace:
        """The product's scores of the mini-batch, from backward passes of its loss, one for each mixed group."""
        responses = self.responses
        advantages = self.advantages[responses]
        older = config.about == "output_function"
        kept = {p: p.grad for p in self._steps.parameters.values()}
        self.model.zero_grad()
        with InfluenceTracer(self.model, config=config, optimizer=self.optimizer) as tracer:
            for members in self.members.values():
                places = torch.tensor([responses.index(r) for r in members])
                _, tokens = self._padded(members)
                raised = torch.cat(self._raised(members)).sum()
                with tracer.capture(
                    response=places,
                    tokens=tokens,
                    accepted=self.accepted[responses],
                    group=self.group[responses],
                    advantages=advantages,
                    scale=-float(self.tokens),
                    target_scale=None if older else -self.tokens / advantages,
                    sign=torch.where(advantages < 0, -1.0, 1.0) if older else None,
                ):
                    (-raised / self.tokens).backward()
            if self.grad_clip:
                nn.utils.clip_grad_norm_(self._steps.parameters.values(), self.grad_clip)
            trace = tracer.score(
                terms=lambda chosen: torch.cat(self._raised([responses[place] for place in chosen])),
                coming=True if coming else None,
            )
        for parameter, gradient in kept.items():
            parameter.grad = gradient
        return trace

    def scores(self, config: InfluenceConfig, coming: bool = True) -> dict[int, Tensor]:
        """Response → [T_r], of the mixed groups."""
        trace = self.traced(config, coming)
        return {r: trace.token_scores[place].double().cpu() for place, r in enumerate(self.responses)}

    def baselines(self) -> dict[str, dict[int, Tensor]]:
        """Scores that need no gradient: response → [T_r]."""
        found: dict[str, dict[int, Tensor]] = {name: {} for name in FREE}
        for members in self.members.values():
            with torch.no_grad():
                log_probs = self.log_probs(members)
            for r, values in zip(members, log_probs, strict=True):
                size, own = float(self.advantages[r].abs()), values.cpu()
                factors = (1 - own.exp(), -own, torch.ones_like(own))
                for name, factor in zip(FREE, factors, strict=True):
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
        grad_clip: float = 0.0,
        original: Original | None = None,
    ) -> None:
        """`grad_clip`: the norm to which gradients are clipped before a step, as training does; 0 = not at all.
        `original`: where weights and state come back from; without it they are kept, which takes a copy of them."""
        self.optimizer = optimizer
        self.grad_clip = grad_clip
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
        """`measure()` at the weights that a step with this gradient leads to, which is clipped in place; parameters it
        leaves out have a gradient of zero, so that momentum moves them as it would."""
        for name, p in self.parameters.items():
            found = gradient.get(name)
            p.grad = torch.zeros_like(p) if found is None else found.detach().to(p.dtype)
        if self.grad_clip:
            nn.utils.clip_grad_norm_(self.parameters.values(), self.grad_clip)
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
