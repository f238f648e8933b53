"""One mini-batch at one state of training: what steps on parts of it really do, and what every score says they do.

The step of a token is its term of the policy gradient at the weights that sampled it, A_r ℓ_t / N with N the tokens
of the mini-batch. What is measured is a group's contrast, the mean of its accepted responses' mean log-probs minus
that of the rejected ones, after a real optimizer step on the chosen tokens alone, minus the same after a step with a
zero gradient: momentum and weight decay move the weights, too, and are not the tokens' doing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradtrace.attribution import InfluenceConfig, InfluenceTracer
from gradtrace.attribution.result import InfluenceTrace
from gradtrace.instruments.verify.real_steps import RealSteps

Gradient = dict[str, Tensor]


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
    _steps: RealSteps = field(init=False)

    def __post_init__(self) -> None:
        self._steps = RealSteps(self.model, self.optimizer, self.grad_clip)
        self.lengths = [len(s) - p for s, p in zip(self.sequences, self.prompt_lengths, strict=True)]
        self.tokens = sum(self.lengths)
        mixed = [
            g for g in self.group.unique().tolist() if self.accepted[self.group == g].unique().numel() == 2
        ]
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
        logits = self.model(input_ids=ids, use_cache=False).logits
        scores = torch.log_softmax(logits[:, :-1] / self.temperature, -1)
        found = scores.gather(-1, ids[:, 1:, None]).squeeze(-1)
        return [found[i][tokens[i, 1:]] for i in range(len(responses))]

    def _padded(self, responses: list[int]) -> tuple[Tensor, Tensor]:
        """ids and where they are response tokens, [B, S]. Padding on the right is 0: nothing before it sees it."""
        longest = max(len(self.sequences[r]) for r in responses)
        ids = torch.zeros(len(responses), longest, dtype=torch.long)
        tokens = torch.zeros(len(responses), longest, dtype=torch.bool)
        for i, r in enumerate(responses):
            ids[i, : len(self.sequences[r])] = self.sequences[r]
            tokens[i, self.prompt_lengths[r] : len(self.sequences[r])] = True
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

    def effects(self, gradients: Iterator[Gradient] | list[Gradient], groups: list[int]) -> Tensor:
        """[n, G]: the change of each group's contrast by a step along each gradient, without momentum's own."""
        idle = self._steps.effect({}, lambda: self.contrasts(groups))
        found = [self._steps.effect(g, lambda: self.contrasts(groups)) - idle for g in gradients]
        self.steps_taken += len(found)
        return torch.stack(found)

    def update_seconds(self) -> tuple[float, float]:
        """What forward and backward pass of the kept groups take, and what the optimizer's step does."""
        whole = {r: torch.ones(self.lengths[r], dtype=torch.bool) for m in self.members.values() for r in m}
        begun = time.perf_counter()
        gradient = self.subset_gradient(whole)
        middle = time.perf_counter()
        self._steps.effect(gradient, lambda: torch.zeros(()))
        return middle - begun, time.perf_counter() - middle

    def token_gradients(self, response: int, tokens: list[int]) -> Iterator[Gradient]:
        """Of the loss terms of single tokens, one after the other: a step may be taken between two of them."""
        for token in tokens:
            mask = torch.zeros(self.lengths[response], dtype=torch.bool)
            mask[token] = True
            yield self.subset_gradient({response: mask})

    def subset_gradient(self, chosen: dict[int, Tensor]) -> Gradient:
        """Of the loss of some tokens: response → bool[T_r]."""
        responses = [r for r, mask in chosen.items() if bool(mask.any())]
        if not responses:
            return {}
        terms = [
            -float(self.advantages[r]) / self.tokens * values[chosen[r]].sum()
            for r, values in zip(responses, self.log_probs(responses), strict=True)
        ]
        names, weights = zip(*self._steps.parameters.items(), strict=True)
        found = torch.autograd.grad(torch.stack(terms).sum(), weights, allow_unused=True)
        return {name: g for name, g in zip(names, found, strict=True) if g is not None}

    # ------------------------------------------------------------ what scores say

    def traced(self, config: InfluenceConfig, coming: bool = True) -> InfluenceTrace:
        """The product's scores of the mini-batch, from one backward pass of its loss over the mixed groups."""
        responses = [r for members in self.members.values() for r in members]
        advantages = self.advantages[responses]
        _, tokens = self._padded(responses)
        with InfluenceTracer(self.model, config, optimizer=self.optimizer) as tracer:
            values = self.log_probs(responses)
            loss = -sum(
                float(self.advantages[r]) / self.tokens * v.sum()
                for r, v in zip(responses, values, strict=True)
            )
            older = config.target == "output_function"
            with tracer.capture(
                response=torch.arange(len(responses)),
                tokens=tokens,
                accepted=self.accepted[responses],
                group=self.group[responses],
                advantages=advantages,
                scale=-float(self.tokens),
                target_scale=None if older else -self.tokens / advantages,
                sign=torch.where(advantages < 0, -1.0, 1.0) if older else None,
            ):
                loss.backward()  # type: ignore[union-attr]
            if self.grad_clip:
                nn.utils.clip_grad_norm_(self._steps.parameters.values(), self.grad_clip)

            def terms(chosen: list[int]) -> Tensor:
                own = self.log_probs([responses[place] for place in chosen])
                return torch.cat([advantages[place] * v for place, v in zip(chosen, own, strict=True)])

            trace = tracer.score(terms=terms, coming=True if coming else None)
        self.model.zero_grad()
        return trace

    def scores(self, config: InfluenceConfig, coming: bool = True) -> dict[int, Tensor]:
        """Response → [T_r], of the mixed groups."""
        trace = self.traced(config, coming)
        responses = [r for members in self.members.values() for r in members]
        return {r: trace.token_scores[place].double() for place, r in enumerate(responses)}

    def baselines(self) -> dict[str, dict[int, Tensor]]:
        """Scores that need no gradient: response → [T_r]."""
        responses = [r for members in self.members.values() for r in members]
        with torch.no_grad():
            values = dict(zip(responses, self.log_probs(responses), strict=True))
        size = {r: float(self.advantages[r].abs()) for r in responses}
        return {
            "|A|(1−p)": {r: size[r] * (1 - values[r].exp()) for r in responses},
            "|A|·surprisal": {r: size[r] * -values[r] for r in responses},
            "|A|": {r: torch.full_like(values[r], size[r]) for r in responses},
        }


def float64_model(config: Any, weights: Mapping[str, Tensor], build: Callable[[Any], nn.Module]) -> nn.Module:
    """A transformers model in float64, with norms that do not round to float32 inside."""
    model = build(config)
    model.load_state_dict(weights)
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            parent, _, child = name.rpartition(".")
            norm = nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon)
            norm.weight.data.copy_(module.weight)
            setattr(model.get_submodule(parent), child, norm)
    return model.double().eval()


def adamw_like(
    model: nn.Module,
    groups: list[dict[str, Any]],
    names: list[list[str]],
    state: Mapping[str, Mapping[str, Tensor]],
) -> torch.optim.AdamW:
    """An AdamW for a copy of a model in another precision, with the groups and the state of the original's."""
    parameters = dict(model.named_parameters())
    own = {"params", "fused", "foreach", "decoupled_weight_decay"}
    optimizer = torch.optim.AdamW(
        [
            {**{k: v for k, v in group.items() if k not in own}, "params": [parameters[n] for n in some]}
            for group, some in zip(groups, names, strict=True)
        ]
    )
    for name, found in state.items():
        dtype = parameters[name].dtype
        optimizer.state[parameters[name]] = {
            key: value.detach().clone().to(dtype if value.dim() else value.dtype)
            for key, value in found.items()
        }
    return optimizer
