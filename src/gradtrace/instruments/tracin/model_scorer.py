"""TracIn scores from a model in this process: the host of the embedded loop, of TRL, and of `gradtrace select`. On
several ranks, which all have the weights and know the batch, each runs a part of the responses.

Scores are one forward-mode pass (or one backward pass without weight gradients) over the responses that have an
advantage; `TracInSelector` chooses which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gradtrace.attribution.collectives import Ranks
from gradtrace.instruments.host import Gradient
from gradtrace.instruments.tracin.losses import Weighted, pieces, total_losses
from gradtrace.instruments.tracin.scores import Measures, by_adam, score_parts
from gradtrace.instruments.tracin.selector import TracInSelector
from gradtrace.policy.policy import Policy

Shown = Callable[[Iterable[Any], str], Iterable[Any]]
"""(items, what they are) → the same items, with a progress bar perhaps."""


@dataclass(eq=False)
class ModelScorer:
    """A `TracinHost`, and what a `TracinInstrument` asks for scores."""

    policy: Policy
    selector: TracInSelector
    token_budget: int
    """Tokens in one pass."""
    optimizer: Any = None
    """Whose second moments precondition the validation gradient; None: nothing does."""
    shown: Shown = lambda items, what: items
    ranks: Ranks = field(default_factory=Ranks)

    @property
    def method(self) -> str:
        return self.selector.method

    def __call__(self, step: int, train: Weighted, parts: list[Weighted], measure: bool) -> tuple[Tensor, Measures]:
        return score_parts(self, train, parts, measure)

    def _own(self, responses: Weighted) -> Weighted:
        """The share of the responses that this rank runs: every n-th row of n ranks."""
        return replace(responses, rows=responses.rows[self.ranks.place :: self.ranks.size])

    def gradient(self, responses: Weighted) -> tuple[Gradient, list[float]]:
        own, seen = self._own(responses), list[float]()
        found: Gradient = {}
        if len(own.rows) or self.ranks.size == 1:
            losses = total_losses(self.policy, own, self.token_budget, seen)
            found = self.selector.gradient_of(self.shown(losses, "gradient"))[0]
        if self.ranks.size == 1:
            return found, seen
        parameters = dict(self.policy.model.named_parameters())
        names = dict.fromkeys(name for theirs in self.ranks.gather(list(found)) for name in theirs)
        total = {
            name: self.ranks.sum(found[name] if name in found else torch.zeros_like(parameters[name]).detach())
            for name in names
        }
        return total, [value for theirs in self.ranks.gather(seen) for value in theirs]

    def scores(self, responses: Weighted, direction: Gradient) -> Tensor:
        """float64[b]: of all of `responses`, on every rank."""
        self.selector.set_validation_gradient(direction)
        own = self._own(responses)
        found = pieces(self.policy, own, self.token_budget, self.method)
        scores = self.selector.score(self.shown(found, "scores"), len(responses.batch))[own.rows]
        whole = torch.empty(len(responses.rows), dtype=torch.float64)
        for place, theirs in enumerate(self.ranks.gather(scores.cpu())):
            whole[place :: self.ranks.size] = theirs
        return whole

    def preconditioned(self, gradient: Gradient) -> Gradient:
        if self.optimizer is None:
            return gradient
        named = dict(self.policy.model.named_parameters())
        return by_adam(self.optimizer, named, gradient, "preconditioner")
