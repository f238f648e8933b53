"""TracIn scores on the driver of a verl job: rows are dealt to the ranks (`rank.tracin`), and their answers joined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradtrace.algorithms import Algorithm, advantage, advantage_names
from gradtrace.instruments.tracin.losses import Weighted
from gradtrace.instruments.tracin.scores import Measures
from gradtrace.instruments.tracin.validation import validation_advantage
from gradtrace.integrations.verl.dealing import PADDING, deal
from gradtrace.integrations.verl.rank.losses import PREFIX
from gradtrace.integrations.verl.rank.tracin import RankAnswer, RankRequest, Share

Ask = Callable[[list[RankRequest]], list[RankAnswer]]
"""One request for each rank → what each of them answers."""


@dataclass(eq=False)
class RankedScores:
    """Deals responses to the ranks, and joins the scores that they answer: a `Scorer` of `TracinInstrument`."""

    actor: Any
    """verl's actor configuration."""
    preconditioner: str
    temperature: float
    ranks: int
    ask: Ask
    method: str = "ghost"

    def __call__(self, step: int, train: Weighted, parts: list[Weighted], measure: bool) -> tuple[Tensor, Measures]:
        multiple = 1 if self.actor.use_dynamic_bsz else int(self.actor.ppo_micro_batch_size_per_gpu)
        own, *others = (shares(losses, self.ranks, multiple) for losses in (train, *parts))
        answers = self.ask(
            [
                RankRequest(
                    step,
                    own[rank],
                    [part[rank] for part in others],
                    self.preconditioner,
                    self.temperature,
                    measure,
                )
                for rank in range(self.ranks)
            ]
        )
        scores = torch.full((len(parts), len(train.batch)), torch.nan, dtype=torch.float64)
        for answer in answers:
            scores[:, answer.rows] = answer.scores
        return scores[:, train.rows], answers[0].measures


def validation_estimator(algorithm: Any, options: dict[str, Any]) -> Algorithm:
    """The estimator of a verl configuration, where it is ours and needs rewards alone; else GRPO's."""
    name = str(algorithm.adv_estimator)
    ours = name.startswith(PREFIX) and name.removeprefix(PREFIX) in advantage_names()
    return validation_advantage(name.removeprefix(PREFIX), options) if ours else advantage("grpo")


def shares(losses: Weighted, ranks: int, multiple: int = 1) -> list[Share]:
    """The responses dealt to ranks, about equally many tokens each; filled up with a short one without weight."""
    batch, chosen = losses.batch, losses.rows.tolist()
    ids = batch.response_ids
    total = batch.prompt_lengths + batch.response_lengths
    filler = int(total.argmin())
    found = []
    for part in deal(total[losses.rows].tolist(), ranks, multiple):
        own = [(PADDING, filler) if item == PADDING else (chosen[item], chosen[item]) for item in part]
        found.append(
            Share(
                torch.tensor([row for row, _ in own]),
                [batch.prompts[int(batch.group[source])] for _, source in own],
                [ids[source] for _, source in own],
                [losses.weights[source, : len(ids[source])].float() * float(row != PADDING) for row, source in own],
            )
        )
    return found
