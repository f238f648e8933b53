"""The update: mini-batches of whole groups, micro-batches by token budget, one optimizer step per mini-batch."""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradtrace.algorithms import Denominator, aggregate
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.contract import OptimizerStep
from gradtrace.instruments.observers import Observers
from gradtrace.policy.loss import PolicyLoss
from gradtrace.policy.microbatch import MicroBatch, MicroBatches
from gradtrace.policy.optimizer import Optimizer

if TYPE_CHECKING:
    from gradtrace.training.host import EmbeddedHost


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
        observers: Observers | None = None,
        host: EmbeddedHost | None = None,
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """All optimizer steps on this batch. Returns it with old_log_probs (and entropies) completed, and metrics.
        `observers` of the step under way look on through their `host`.

        The first optimizer step runs at the weights that sampled the batch, so its own forward pass gives the old
        log-probs of its rows. Those of all other rows must be set already.
        """
        metrics = UpdateMetrics()
        empty = torch.zeros_like(batch.sampler_log_probs)
        # Columns of this batch alone, to be written to as passes go by.
        own = {name: getattr(batch, name) for name in ("old_log_probs", "entropies")}
        batch = batch.replace(**{name: (empty if c is None else c).clone() for name, c in own.items()})

        for update in updates:
            denominator = Denominator.of(batch.response_mask[update.rows], self.loss.max_response_length)
            watched = observers if observers and update.epoch == 0 else None
            if watched is not None and host is not None:
                host.train_on(batch, micro_batches, self.loss, update)
                watched.before_passes(update, host.own(update))
            for micro in micro_batches(update.rows):
                with around(watched, host, micro):
                    loss = self._micro_loss(batch, micro, denominator, update.number == 0, metrics)
                    loss.backward()
            metrics.mini_batch(denominator.tokens)
            self.take_step(update, watched, metrics)
        return batch, metrics.metrics()

    def take_step(self, update: OptimizerStep, observers: Observers | None, metrics: UpdateMetrics) -> None:
        """Move the weights, unless the gradient is not finite: one bad batch must not destroy the policy. Without
        `moves` everything happens but the move itself."""
        is_finite = metrics.is_finite(self.optimizer.clip())
        if is_finite:
            if observers is not None:
                observers.before_step(update)
            if self.moves:
                self.optimizer.step()
        if observers is not None:
            observers.after_step(update, is_finite)
        self.optimizer.zero_grad()

    def _micro_loss(
        self, batch: RolloutBatch, micro: MicroBatch, denominator: Denominator, is_first: bool, metrics: UpdateMetrics
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
        metrics.micro_batch(policy_term, loss, token_sums)
        return loss


def around(observers: Observers | None, host: EmbeddedHost | None, micro: MicroBatch) -> AbstractContextManager[Any]:
    """What observers do around the pass over a micro-batch."""
    if observers is None or host is None:
        return nullcontext()
    return observers.around_backward(host.backward(host.training, micro))


class UpdateMetrics:
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

    def is_finite(self, norm: float) -> bool:
        """Count a gradient of this norm; whether its optimizer step is made."""
        if not math.isfinite(norm):
            self.skipped += 1
            return False
        self.norms.append(norm)
        return True

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
