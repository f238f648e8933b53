"""One mini-batch at one state of training: what steps on parts of it really do, and what every score says they do.

The step of a token is its term of the policy gradient at the weights that sampled it, A_r ℓ_t / N with N the tokens
of the mini-batch. What is measured is a group's contrast, the mean of its accepted responses' mean log-probs minus
that of the rejected ones, after a real optimizer step on the chosen tokens alone, minus the same after a step with a
zero gradient: momentum and weight decay move the weights, too, and are not the tokens' doing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gradtrace.attribution import InfluenceConfig, InfluenceTracer
from gradtrace.attribution.result import InfluenceTrace
from gradtrace.instruments.entropy_probe.passes import KeepDouble
from gradtrace.instruments.verify.real_steps import Original, RealSteps

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

    def update_seconds(self) -> tuple[float, float]:
        """What forward and backward pass of the kept groups take, and what the optimizer's step does."""
        whole = {r: torch.ones(self.lengths[r], dtype=torch.bool) for m in self.members.values() for r in m}
        begun = time.perf_counter()
        gradient = self.subset_gradient(whole)
        middle = time.perf_counter()
        self._steps.effect(gradient, lambda: torch.zeros(()))
        return middle - begun, time.perf_counter() - middle

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
        responses = [r for members in self.members.values() for r in members]
        advantages = self.advantages[responses]
        older = config.target == "output_function"
        kept = {p: p.grad for p in self._steps.parameters.values()}
        self.model.zero_grad()
        with InfluenceTracer(self.model, config, optimizer=self.optimizer) as tracer:
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
        responses = [r for members in self.members.values() for r in members]
        return {r: trace.token_scores[place].double().cpu() for place, r in enumerate(responses)}

    def baselines(self) -> dict[str, dict[int, Tensor]]:
        """Scores that need no gradient: response → [T_r]."""
        responses = [r for members in self.members.values() for r in members]
        with torch.no_grad():
            values = {
                r: found.cpu()
                for members in self.members.values()
                for r, found in zip(members, self.log_probs(members), strict=True)
            }
        size = {r: float(self.advantages[r].abs()) for r in responses}
        found = (
            {r: size[r] * (1 - values[r].exp()) for r in responses},
            {r: size[r] * -values[r] for r in responses},
            {r: torch.full_like(values[r], size[r]) for r in responses},
        )
        return dict(zip(FREE, found, strict=True))
