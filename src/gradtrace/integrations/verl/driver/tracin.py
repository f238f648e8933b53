"""TracIn selection on the driver of a verl job: who scores what, and what the update is given.

The step is that of the embedded loop (`TracinSelection`); scores come from the ranks (`tracin_rank`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradtrace.algorithms import Algorithm, Denominator, advantage, advantage_names, token_weights
from gradtrace.batch import RolloutBatch
from gradtrace.config import TracinConfig
from gradtrace.errors import GradtraceError
from gradtrace.instruments.columns import Truth, no_truth
from gradtrace.instruments.tracin.columns import TracinStep
from gradtrace.instruments.tracin.losses import validation_weights, with_advantage
from gradtrace.instruments.tracin.step import TracinSelection, logger
from gradtrace.instruments.tracin.validation import ValidationSource
from gradtrace.integrations.verl.rank.losses import PREFIX
from gradtrace.integrations.verl.rank.tracin import RankAnswer, RankRequest, Share
from gradtrace.trace.writer import TraceWriter

Ask = Callable[[list[RankRequest]], list[RankAnswer]]
"""One request for each rank → what each of them answers."""


class VerlTracin(TracinSelection):
    def __init__(
        self,
        settings: TracinConfig,
        actor: Any,
        temperature: float,
        ranks: int,
        ask: Ask,
        source: ValidationSource,
        writer: TraceWriter | None,
        meta: dict[str, Any] | None = None,
        truth: Truth = no_truth,
        report: Callable[[str], None] = logger.warning,
    ) -> None:
        """`actor`: verl's actor configuration."""
        super().__init__(settings, "ghost", source, writer, meta, truth, report)
        self.actor = actor
        self.temperature = temperature
        self.ranks = ranks
        self.ask = ask

    def before_update(self, batch: RolloutBatch, step: int) -> RolloutBatch:
        self._number = step
        return super().before_update(batch, step)

    def _scores(self, batch: RolloutBatch, val_batch: RolloutBatch, result: TracinStep) -> Tensor:
        rows = torch.arange(len(val_batch))
        return self._answers(batch, val_batch, [rows], result, measure=False)[0]

    def _scores_in_parts(
        self, batch: RolloutBatch, val_batch: RolloutBatch, parts: list[Tensor], result: TracinStep
    ) -> Tensor:
        return self._answers(batch, val_batch, parts, result, measure=True)

    def _answers(
        self,
        batch: RolloutBatch,
        val_batch: RolloutBatch,
        parts: list[Tensor],
        result: TracinStep,
        measure: bool,
    ) -> Tensor:
        """float64[K, R]; a response without an advantage has no gradient and scores 0."""
        multiple = 1 if self.actor.use_dynamic_bsz else int(self.actor.ppo_micro_batch_size_per_gpu)
        scored = with_advantage(batch)
        train = shares(batch, scored, self._training_weights(batch), self.ranks, multiple)
        weights = validation_weights(val_batch)
        validation = [
            shares(val_batch, rows[(weights[rows] != 0).any(1)], weights, self.ranks, multiple)
            for rows in parts
        ]
        answers = self.ask(
            [
                RankRequest(
                    self._number,
                    train[rank],
                    [part[rank] for part in validation],
                    self.settings.preconditioner,
                    self.temperature,
                    measure,
                )
                for rank in range(self.ranks)
            ]
        )
        scores = torch.zeros(len(parts), len(batch), dtype=torch.float64)
        scores[:, scored] = torch.nan  # until a rank has answered for it
        for answer in answers:
            scores[:, answer.rows] = answer.scores
        first = answers[0]  # what is known of whole gradients is the same on every rank
        result.val_loss, result.val_norm, result.val_norms = first.val_loss, first.val_norm, first.val_norms
        if measure:
            result.train_norm, result.direction_norm = first.train_norm, first.direction_norm
            result.cosine = first.cosine
        return scores

    def _training_weights(self, batch: RolloutBatch) -> Tensor:
        """float[R, T]: what multiplies each log-prob in the batch's policy gradient loss."""
        assert batch.advantages is not None
        return -batch.advantages * aggregation_weights(batch.response_mask, self.actor)


def aggregation_weights(mask: Tensor, actor: Any) -> Tensor:
    """float[R, T]: verl's `loss_agg_mode` over a whole batch with this mask, as `core_algos.agg_loss` weighs tokens."""
    mode = actor.loss_agg_mode
    if mode == "token-sum":
        return mask.float()
    ours = {
        "token-mean": "token_mean",
        "seq-mean-token-mean": "sequence_mean",
        "seq-mean-token-sum": "fixed_length",
        "seq-mean-token-sum-norm": "fixed_length",
    }
    if mode not in ours:
        raise GradtraceError(
            f"actor.loss_agg_mode={mode}: how it weighs tokens is not known to TracIn selection"
        )
    length = 1
    if mode == "seq-mean-token-sum-norm":
        length = int(actor.loss_scale_factor or mask.sum(1).max())
    return token_weights(mask, ours[mode], Denominator.of(mask, length))


def validation_estimator(algorithm: Any, options: dict[str, Any]) -> Algorithm:
    """Of a verl configuration: the run's estimator, where it is ours and needs rewards alone; else GRPO's."""
    name = str(algorithm.adv_estimator)
    if name.startswith(PREFIX) and name.removeprefix(PREFIX) in advantage_names():
        own = advantage(name.removeprefix(PREFIX), **options)
        if not own.needs:
            return own
    return advantage("grpo")


def shares(batch: RolloutBatch, rows: Tensor, weights: Tensor, ranks: int, multiple: int = 1) -> list[Share]:
    """`rows` dealt to ranks, about equally many tokens each; filled up with a short response that has no weight, so
    that all have the same multiple of `multiple`. `weights`: float[R, T]."""
    lengths = batch.response_lengths
    total = batch.prompt_lengths + lengths
    order = rows[torch.argsort(total[rows], descending=True, stable=True)].tolist()
    size = max(1, -(-len(order) // (ranks * multiple))) * multiple
    filler = int(total.argmin())
    found = []
    for rank in range(ranks):
        mine = snake(order, rank, ranks)
        own = [*mine, *[filler] * (size - len(mine))]
        found.append(
            Share(
                torch.tensor([*mine, *[-1] * (size - len(mine))], dtype=torch.long),
                [batch.prompts[int(batch.group[row])] for row in own],
                [batch.responses[row, : int(lengths[row])].clone() for row in own],
                [
                    weights[row, : int(lengths[row])].float() * (1.0 if place < len(mine) else 0.0)
                    for place, row in enumerate(own)
                ],
            )
        )
    return found


def snake(items: Sequence[int], rank: int, ranks: int) -> list[int]:
    """Longest first, to and fro: 0 1 2 2 1 0 0 1 2 …"""
    return [
        item
        for place, item in enumerate(items)
        if (place % ranks if place // ranks % 2 == 0 else ranks - 1 - place % ranks) == rank
    ]
