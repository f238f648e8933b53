"""Steps on tokens, responses and random halves of groups, and how well scores order and size their effects."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradtrace.instruments.verify.trial import Scores, Trial
from gradtrace.intervals import Interval, mean_interval


def ranks(values: Tensor) -> Tensor:
    """float64: ranks from 0; equal values share the mean of theirs."""
    values = values.double()
    _, where, counts = torch.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum(0).double() - (counts.double() + 1) / 2)[where]


def pearson(predicted: Tensor, measured: Tensor) -> float:
    """Correlation; NaN where either does not vary."""
    first, second = (v.double() - v.double().mean() for v in (predicted, measured))
    length = float(first.norm() * second.norm())
    return float(first @ second) / length if length else math.nan


def spearman(predicted: Tensor, measured: Tensor) -> float:
    """Rank correlation; NaN where either does not vary."""
    return pearson(ranks(predicted), ranks(measured))


def slope(predicted: Tensor, measured: Tensor) -> float:
    """Of predicted = slope · measured, by least squares."""
    length = float(measured.double().square().sum())
    return float(predicted.double() @ measured.double()) / length if length else math.nan


def interval(values: Sequence[float]) -> Interval:
    """Mean of correlations over groups with a 95 % interval, Student's, within −1 and 1; NaN are left out."""
    found = mean_interval(values)
    return dataclasses.replace(found, low=max(found.low, -1.0), high=min(found.high, 1.0))


Pairs = tuple[Tensor, Tensor]
"""What a score said of some steps, and what they did."""
Statistic = Callable[[Tensor, Tensor], float]


def pooled(groups: Sequence[Pairs], statistic: Statistic) -> float:
    """The statistic over the steps of all groups together."""
    return statistic(*(torch.cat(values) for values in zip(*groups, strict=True))) if groups else math.nan


def jackknife(groups: Sequence[Pairs], statistic: Statistic) -> list[float]:
    """One number per group. Their mean is the statistic over all groups' steps together, and the interval of that mean
    is the jackknife's: how much it depends on which groups there are."""
    whole, count = pooled(groups, statistic), len(groups)
    if count < 2:
        return [whole] * count
    without = [pooled([*groups[:place], *groups[place + 1 :]], statistic) for place in range(count)]
    return [whole + (count - 1) * (sum(without) / count - one) for one in without]


KINDS = {"token": "single tokens", "response": "single responses", "half": "half of a group's tokens"}
"""What the weight is changed of."""
FEWEST = 6
"""Steps of a kind that a rank correlation is taken of, where not all that were planned are there."""


@dataclass(frozen=True)
class Question:
    """A column of the table: which steps, what they changed, and how scores are compared with that."""

    title: str
    kind: str
    own: bool = False
    """The change of the objective of the tokens' own prompt; else of the mini-batch's."""
    statistic: Statistic = spearman


QUESTIONS = {
    "token": Question("single tokens", "token"),
    "token_pearson": Question("Pearson", "token", statistic=pearson),
    "token_own": Question("in their own prompt", "token", own=True),
    "token_own_pearson": Question("Pearson", "token", own=True, statistic=pearson),
    "response": Question("single responses", "response"),
    "half": Question("halves of groups", "half"),
}


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    groups: int = 8
    """Groups at most."""
    tokens: int = 24
    """Single tokens of a group at most, drawn at random (0 = all)."""
    halves: int = 12
    """Random halves of a group's tokens; 0 leaves them out, and single responses with them."""


@dataclass(eq=False)
class Effects:
    """Steps of one kind on tokens of one group, and what those that were taken did."""

    kind: str
    group: int
    chosen: list[dict[int, Tensor]]
    """Per step: row → bool[T_r], the tokens whose weight is changed."""
    measured: list[list[float]] = field(default_factory=list)
    """Per step: the change of the mini-batch's objective, and that of the group's part of it."""

    @property
    def left(self) -> int:
        return len(self.chosen) - len(self.measured)

    @property
    def is_enough(self) -> bool:
        return len(self.measured) >= min(FEWEST, len(self.chosen))

    def take_next(self, trial: Trial) -> None:
        """Take the next step."""
        changes = trial.effect(self.chosen[len(self.measured)])
        self.measured.append([float(changes.sum()), float(changes[list(trial.members).index(self.group)])])

    def take_all(self, trial: Trial) -> Effects:
        while self.left:
            self.take_next(trial)
        return self

    def predicted(self, scores: Scores) -> list[float]:
        """The sum of the scores of every step that was taken; NaN where there is none of one of the tokens."""
        return [
            sum(float(scores[r][mask].sum()) if r in scores else math.nan for r, mask in step.items())
            for step in self.chosen[: len(self.measured)]
        ]

    def pairs(self, scores: Scores, own: bool = False) -> Pairs:
        """Of the steps that have scores: their sums, and what they did to the mini-batch's or the group's objective."""
        predicted = torch.tensor(self.predicted(scores), dtype=torch.float64)
        measured = torch.tensor([step[int(own)] for step in self.measured], dtype=torch.float64)
        return predicted[~predicted.isnan()], measured[~predicted.isnan()]


def answers(effects: Sequence[Effects], scores: Scores, question: Question) -> list[float]:
    """One number per group, NaN where too little of it is there: correlations within the groups for what tokens do to
    their own prompt, and of all groups' steps together (`jackknife`) for what they do to the mini-batch."""
    of_kind = [some for some in effects if some.kind == question.kind]
    pairs = [some.pairs(scores, question.own) for some in of_kind]
    known = [len(own[0]) > 1 and some.is_enough for own, some in zip(pairs, of_kind, strict=True)]
    if question.own:
        return [question.statistic(*own) if is_there else math.nan for own, is_there in zip(pairs, known, strict=True)]
    return together(pairs, known, question.statistic)


def together(pairs: Sequence[Pairs], known: Sequence[bool], statistic: Statistic) -> list[float]:
    """`jackknife` of the groups that are known; NaN for the others."""
    values = iter(jackknife([own for own, is_there in zip(pairs, known, strict=True) if is_there], statistic))
    return [next(values) if is_there else math.nan for is_there in known]


def planned(trial: Trial, size: Size, seed: int) -> list[Effects]:
    """All steps to take, group by group; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for group in list(trial.members)[: size.groups]:
        found.append(single_tokens(trial, group, size.tokens, generator))
        if size.halves:
            found += [single_responses(trial, group), random_halves(trial, group, size.halves, generator)]
    return found


def single_tokens(trial: Trial, group: int, limit: int, generator: torch.Generator) -> Effects:
    """A step on each of (at most `limit`, drawn at random) tokens of a group."""
    places = [(r, t) for r in trial.members[group] for t in range(trial.counts[r])]
    order = torch.randperm(len(places), generator=generator)[: limit or len(places)].sort().values.tolist()
    chosen = []
    for r, t in (places[i] for i in order):
        mask = torch.zeros(trial.counts[r], dtype=torch.bool)
        mask[t] = True
        chosen.append({r: mask})
    return Effects("token", group, chosen)


def single_responses(trial: Trial, group: int) -> Effects:
    chosen = [{r: torch.ones(trial.counts[r], dtype=torch.bool)} for r in trial.members[group]]
    return Effects("response", group, chosen)


def random_halves(trial: Trial, group: int, count: int, generator: torch.Generator) -> Effects:
    """Steps on random halves of the group's tokens."""
    drawn = [
        {r: torch.rand(trial.counts[r], generator=generator) < 0.5 for r in trial.members[group]} for _ in range(count)
    ]
    return Effects("half", group, drawn)
