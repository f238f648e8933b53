"""Steps on tokens, responses and random halves of a mini-batch, and how well scores order their effects."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradtrace.instruments.verify.trial import Trial
from gradtrace.intervals import Interval, mean_interval


def ranks(values: Tensor) -> Tensor:
    """float64: ranks from 0; equal values share the mean of theirs."""
    values = values.double()
    _, where, counts = torch.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum(0).double() - (counts.double() + 1) / 2)[where]


def spearman(predicted: Tensor, measured: Tensor) -> float:
    """Rank correlation; NaN where either does not vary."""
    first, second = (r - r.mean() for r in (ranks(predicted), ranks(measured)))
    length = float(first.norm() * second.norm())
    return float(first @ second) / length if length else math.nan


def interval(values: Sequence[float]) -> Interval:
    """Mean of correlations over groups with a 95 % interval, Student's, within −1 and 1; NaN are left out."""
    found = mean_interval(values)
    return dataclasses.replace(found, low=max(found.low, -1.0), high=min(found.high, 1.0))


Scores = Mapping[int, Tensor]
"""Response → [T_r]."""
KINDS = {
    "single_token": "single tokens",
    "single_response": "single responses",
    "half_tokens": "half of the group's tokens",
    "batch_tokens": "half of the mini-batch's tokens",
    "batch_responses": "half of its responses",
}
"""What steps are taken on. The first three are about their own group's contrast, the others about the sum of all
groups' contrasts."""
FEWEST = 6
"""Steps of a kind that a rank correlation is taken of, where not all that were planned are there."""


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    groups: int = 8
    """Groups at most."""
    tokens: int = 24
    """Single tokens of a group at most, drawn at random (0 = all)."""
    halves: int = 12
    """Random halves of each kind; 0 leaves them out, and single responses with them."""
    whole_batch: bool = False
    """Halves of all groups together as well."""


@dataclass(eq=False)
class Effects:
    """Steps of one kind for one group (or for the whole mini-batch), and what those that were taken did."""

    kind: str
    groups: list[int]
    """Whose contrasts are measured."""
    chosen: list[dict[int, Tensor]]
    """Per step: response → bool[T_r], the tokens that it is taken on."""
    measured: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    """Squared norm of each step's gradient."""

    @property
    def left(self) -> int:
        return len(self.chosen) - len(self.measured)

    def take_next(self, trial: Trial) -> None:
        """Take the next step."""
        gradient = trial.subset_gradient(self.chosen[len(self.measured)])
        self.norms.append(sum(float(g.square().sum()) for g in gradient.values()))
        self.measured.append(trial.effect(gradient, self.groups))

    def take_all(self, trial: Trial) -> Effects:
        while self.left:
            self.take_next(trial)
        return self

    def predicted(self, scores: Scores) -> list[float]:
        """The sum of the scores of every step that was taken."""
        return [
            sum(float(scores[r][mask].nansum()) for r, mask in step.items() if r in scores)
            for step in self.chosen[: len(self.measured)]
        ]

    def agreement(self, scores: Scores) -> float:
        """Spearman's rank correlation of the effects with the sums of the scores; NaN where too little is there."""
        if len(self.measured) < min(FEWEST, len(self.chosen)):
            return math.nan
        predicted = torch.tensor(self.predicted(scores), dtype=torch.float64)
        return spearman(predicted, torch.tensor(self.measured, dtype=torch.float64))

    def squared_norms(self, trial: Trial) -> dict[int, Tensor]:
        """|A|·‖g‖² of the tokens that were stepped on one by one, with g the gradient of the token's log-prob; 0 for
        the others. Response → [T_r]."""
        found: dict[int, Tensor] = {}
        for step, norm in zip(self.chosen, self.norms, strict=False):
            ((r, mask),) = step.items()
            values = found.setdefault(r, torch.zeros(trial.lengths[r], dtype=torch.float64))
            values[mask] = norm / max(float(trial.advantages[r].abs()), 1e-300)
        return found


def planned(trial: Trial, size: Size, seed: int) -> list[Effects]:
    """All steps to take, group by group; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    groups = list(trial.members)
    found = []
    for g in groups:
        found.append(single_tokens(trial, g, size.tokens, generator))
        if size.halves:
            found += [
                single_responses(trial, g),
                random_halves(trial, [g], size.halves, "half_tokens", generator),
            ]
    if size.halves and size.whole_batch:
        whole = ("batch_tokens", "batch_responses")
        found += [random_halves(trial, groups, size.halves, kind, generator) for kind in whole]
    return found


def single_tokens(trial: Trial, group: int, limit: int, generator: torch.Generator) -> Effects:
    """A step on each of (at most `limit`, drawn at random) tokens of a group."""
    places = [(r, t) for r in trial.members[group] for t in range(trial.lengths[r])]
    order = torch.randperm(len(places), generator=generator)[: limit or len(places)].sort().values.tolist()
    chosen = []
    for r, t in (places[i] for i in order):
        mask = torch.zeros(trial.lengths[r], dtype=torch.bool)
        mask[t] = True
        chosen.append({r: mask})
    return Effects("single_token", [group], chosen)


def single_responses(trial: Trial, group: int) -> Effects:
    chosen = [{r: torch.ones(trial.lengths[r], dtype=torch.bool)} for r in trial.members[group]]
    return Effects("single_response", [group], chosen)


def random_halves(trial: Trial, groups: list[int], count: int, kind: str, generator: torch.Generator) -> Effects:
    """Steps on random halves of the groups' tokens; of their responses if `kind` is batch_responses."""
    responses = [r for group in groups for r in trial.members[group]]
    chosen = []
    for _ in range(count):
        if kind == "batch_responses":
            drawn = torch.rand(len(responses), generator=generator) < 0.5
            masks = [torch.full((trial.lengths[r],), bool(d)) for r, d in zip(responses, drawn, strict=True)]
        else:
            masks = [torch.rand(trial.lengths[r], generator=generator) < 0.5 for r in responses]
        chosen.append(dict(zip(responses, masks, strict=True)))
    return Effects(kind, groups, chosen)
