"""The update: mini-batches of whole groups, micro-batches by token budget, one optimizer step per mini-batch."""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradtrace.algorithms import Denominator, aggregate, token_weights
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.observer import Backward, OptimizerStep, Passes, StepObserver
from gradtrace.policy.loss import PolicyLoss
from gradtrace.policy.microbatch import MicroBatch, MicroBatches
from gradtrace.policy.optimizer import Optimizer


def plan_updates(
    batch: RolloutBatch,
    mini_batch_size: int,
    epochs: int,
    shuffle: bool,
    step: int,
    generator: torch.Generator,
) -> list[OptimizerStep]:
    """The optimizer steps of a training step: in every epoch each kept response once, groups whole."""
    kept = torch.ones(len(batch), dtype=torch.bool) if batch.kept is None else batch.kept
    groups = batch.group[kept].unique()
    updates: list[OptimizerStep] = []
    for epoch in range(epochs):
        order = groups[torch.randperm(len(groups), generator=generator)] if shuffle else groups
        for index, chosen in enumerate(order.split(mini_batch_size or max(1, len(order)))):
            rows = (torch.isin(batch.group, chosen) & kept).nonzero().squeeze(-1)
            if len(rows):
                updates.append(OptimizerStep(step, epoch, index, len(updates), rows))
    return updates


@dataclass(eq=False)
class PolicyUpdate:
    loss: PolicyLoss
    optimizer: Optimizer
    moves: bool = True
    """False: the optimizer makes no step, for debugging a trace."""

    def run(
        self,
        batch: RolloutBatch,
        micro_batches: MicroBatches,
        updates: list[OptimizerStep],
        observer: StepObserver,
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """All optimizer steps on this batch. Returns it with old_log_probs (and entropies) completed, and metrics.

        The first optimizer step runs at the weights that sampled the batch, so its own forward pass gives the old
        log-probs of its rows. Those of all other rows must be set already.
        """
        totals = Totals()
        empty = torch.zeros_like(batch.sampler_log_probs)
        # Columns of this batch alone, to be written to as passes go by.
        own = {name: getattr(batch, name) for name in ("old_log_probs", "entropies")}
        batch = batch.replace(**{name: (empty if c is None else c).clone() for name, c in own.items()})

        def passes(rows: Tensor, apart: bool = True) -> Passes:
            return self.loss.passes(batch, micro_batches.with_prompts_apart() if apart else micro_batches, rows)

        for update in updates:
            denominator = Denominator.of(batch.response_mask[update.rows], self.loss.max_response_length)
            for micro in micro_batches(update.rows):
                weights = token_weights(micro.mask, self.loss.algorithm.aggregation, denominator)
                context = Backward(
                    update,
                    micro,
                    weights,
                    partial(self.loss.token_terms, batch, micro_batches),
                    passes,
                )
                with observer.around_backward(context):
                    loss = self._micro_loss(batch, micro, denominator, update.number == 0, totals)
                    loss.backward()
            totals.mini_batch(denominator.tokens)
            if not totals.apply(self.optimizer, observer.around_optimizer_step(update), self.moves):
                observer.step_skipped(update)
        return batch, totals.metrics()

    def _micro_loss(
        self, batch: RolloutBatch, micro: MicroBatch, denominator: Denominator, is_first: bool, totals: Totals
    ) -> Tensor:
        """The micro-batch's share of the mini-batch's loss."""
        log_probs, entropies = (micro.unflatten(values) for values in self.loss.policy.statistics(micro))
        device = log_probs.device
        mask = micro.mask.to(device)
        if is_first:
            for name, values in (("old_log_probs", log_probs), ("entropies", entropies)):
                batch.need(name)[micro.rows, : micro.mask.shape[1]] = values.detach().cpu()
        policy_losses, penalties, token_sums = self.loss.losses(batch, micro, log_probs, entropies)
        policy_term = aggregate(policy_losses, mask, self.loss.algorithm.aggregation, denominator)
        loss = policy_term
        for penalty in penalties:
            loss = loss + aggregate(penalty, mask, self.loss.algorithm.aggregation, denominator)
        totals.micro_batch(policy_term, loss, token_sums)
        return loss


class Totals:
    """Sums over the micro-batches of a training step, from which its metrics are made."""

    def __init__(self) -> None:
        self.tokens = 0
        # Sums stay on the device until the step is over: on a GPU every look makes the host wait.
        self.token_sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
        self.losses: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
        self.mini_batches = 0
        self.norms: list[float] = []
        self.skipped = 0

    def micro_batch(self, policy_term: Tensor, loss: Tensor, token_sums: dict[str, Tensor]) -> None:
        for name, value in (("actor/pg_loss", policy_term), ("actor/loss", loss)):
            self.losses[name] = self.losses[name] + value.detach().double()
        for name, value in token_sums.items():
            self.token_sums[name] = self.token_sums[name] + value.double()

    def mini_batch(self, tokens: int) -> None:
        self.tokens += tokens
        self.mini_batches += 1

    def apply(
        self, optimizer: Optimizer, around: AbstractContextManager[Any] | None = None, moves: bool = True
    ) -> bool:
        """Move the weights, unless the gradient is not finite: one bad batch must not destroy the policy. Without
        `moves` everything happens but the move itself. Returns whether the gradient was finite."""
        norm = optimizer.clip()
        if finite := math.isfinite(norm):
            self.norms.append(norm)
            with around or nullcontext():
                if moves:
                    optimizer.step()
        else:
            self.skipped += 1
        optimizer.zero_grad()
        return finite

    @property
    def grad_norm(self) -> float:
        """Mean over the optimizer steps that were made."""
        return sum(self.norms) / len(self.norms) if self.norms else 0.0

    def metrics(self) -> dict[str, float]:
        """Means over tokens, mini-batches and optimizer steps; and how many steps were skipped."""
        result = {name: float(value) / max(1, self.tokens) for name, value in self.token_sums.items()}
        result.update({name: float(value) / max(1, self.mini_batches) for name, value in self.losses.items()})
        result["actor/grad_norm"] = self.grad_norm
        result["actor/skipped_updates"] = float(self.skipped)
        return result
