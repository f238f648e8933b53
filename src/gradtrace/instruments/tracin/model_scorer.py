"""TracIn scores from a model in this process: the host of the embedded loop, of TRL, and of `gradtrace select`.

Scores are one forward-mode pass (or one backward pass without weight gradients) over the responses that have an
advantage; `TracInSelector` chooses which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

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

    def __call__(
        self, step: int, train: Weighted, parts: list[Weighted], measure: bool
    ) -> tuple[Tensor, Measures]:
        return score_parts(self, train, parts, measure)

    def gradient(self, responses: Weighted) -> tuple[Gradient, list[float]]:
        seen: list[float] = []
        losses = total_losses(self.policy, responses, self.token_budget, seen)
        return self.selector.gradient_of(self.shown(losses, "gradient"))[0], seen

    def scores(self, responses: Weighted, direction: Gradient) -> Tensor:
        self.selector.set_validation_gradient(direction)
        found = pieces(self.policy, responses, self.token_budget, self.method)
        return self.selector.score(self.shown(found, "scores"), len(responses.batch))[responses.rows]

    def preconditioned(self, gradient: Gradient) -> Gradient:
        if self.optimizer is None:
            return gradient
        named = dict(self.policy.model.named_parameters())
        return by_adam(self.optimizer, named, gradient, "preconditioner")
