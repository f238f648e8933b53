"""TracIn selection inside the training loop: scores from the model of this process.

Scores are taken once per training step, before its first update, at the weights that sampled the batch: one
forward-mode pass (or one backward pass without weight gradients) over the responses that have an advantage. The update
then runs forward and backward on the kept responses alone, so a dropped response costs its score and nothing more.

A response's training loss is its own term −Σ_t w_t A_t ℓ_t of the policy gradient, w as the run aggregates tokens: at
the weights that sampled it, every policy loss of ours has this gradient. KL and entropy terms do not depend on
rewards and are left out. The scores of a batch add up to ⟨∇L_val, ∇L_train⟩.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gradtrace.algorithms import Denominator, token_weights
from gradtrace.attribution.tangent import norm
from gradtrace.batch import RolloutBatch
from gradtrace.config import Config
from gradtrace.instruments.columns import Truth, no_truth
from gradtrace.instruments.tracin.columns import TracinStep, layer_norms
from gradtrace.instruments.tracin.losses import (
    best_layout,
    pieces,
    total_losses,
    validation_weights,
    with_advantage,
)
from gradtrace.instruments.tracin.selector import Loss, TracInSelector
from gradtrace.instruments.tracin.step import TracinSelection, logger
from gradtrace.instruments.tracin.validation import ValidationSource
from gradtrace.policy.optimizer import Optimizer
from gradtrace.policy.policy import Policy
from gradtrace.trace.writer import TraceWriter


class TracinInstrument(TracinSelection):
    def __init__(
        self,
        config: Config,
        policy: Policy,
        optimizer: Optimizer,
        source: ValidationSource,
        writer: TraceWriter | None,
        meta: dict[str, Any] | None = None,
        truth: Truth = no_truth,
        report: Callable[[str], None] = logger.warning,
    ) -> None:
        """`writer`: None stores nothing."""
        self.config = config
        self.policy = policy
        self.optimizer = optimizer
        settings = config.trainer.tracin
        self.selector = TracInSelector(policy.model, settings.method, settings.parameters)
        super().__init__(settings, self.selector.method, source, writer, meta, truth, report)

    def state(self) -> dict[str, Tensor]:
        return {f"tracin/{name}": tensor for name, tensor in self.source.state().items()}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        prefix = "tracin/"
        self.source.load_state(
            {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
        )

    # ------------------------------------------------------------ scores

    def _scores(self, batch: RolloutBatch, val_batch: RolloutBatch, result: TracinStep) -> Tensor:
        self.selector.set_validation(self._validation_losses(val_batch, all_rows(val_batch)))
        self._keep_gradient(result)
        self._precondition()
        return self._score(batch)

    def _scores_in_parts(
        self, batch: RolloutBatch, val_batch: RolloutBatch, parts: list[Tensor], result: TracinStep
    ) -> Tensor:
        total: dict[str, Tensor] = {}
        scores, loss = [], 0.0
        for rows in parts:
            self.selector.set_validation(self._validation_losses(val_batch, rows))
            loss += self.selector.loss
            for name, part in self.selector.gradient.items():
                total[name] = total[name] + part if name in total else part
            self._precondition()
            scores.append(self._score(batch))
        self.selector.set_validation_gradient(total)
        self.selector.loss = loss
        self._keep_gradient(result)
        gradient, _ = self.selector.gradient_of(self._training_losses(batch))
        result.train_norm = norm(gradient.values())
        product = sum(
            float((gradient[name] * part).sum()) for name, part in total.items() if name in gradient
        )
        result.cosine = product / max(result.train_norm * result.val_norm, 1e-300)
        self._precondition()
        result.direction_norm = self.selector.norm
        return torch.stack(scores)

    def _keep_gradient(self, result: TracinStep) -> None:
        """Note down what is known of the validation gradient, before a preconditioner changes it."""
        result.val_loss, result.val_norm = self.selector.loss, self.selector.norm
        result.val_norms = layer_norms(self.selector.gradient)

    def _precondition(self) -> None:
        """The validation gradient divided by Adam's √v̂ + ε, from the optimizer's state before this step."""
        if self.settings.preconditioner == "none":
            return
        adamw, named = self.optimizer.adamw, self.optimizer.parameters
        beta, epsilon = adamw.defaults["betas"][1], adamw.defaults["eps"]
        scaled = {}
        for name, gradient in self.selector.gradient.items():
            state = adamw.state.get(named[name])
            if not state:
                continue  # it has never had a gradient, and no update moves it
            second = state["exp_avg_sq"] / (1 - beta ** float(state["step"]))
            scaled[name] = gradient / (second.sqrt() + epsilon)
        if scaled:  # before the first update there is nothing to go by
            self.selector.set_validation_gradient(scaled)

    # ------------------------------------------------------------ losses

    def _validation_losses(self, batch: RolloutBatch, rows: Tensor) -> Iterator[Loss]:
        """L_val of the whole set, the share of `rows`, micro-batch by micro-batch."""
        weights = validation_weights(batch)
        counted = rows[(weights[rows] != 0).any(1)]
        # A part of the set without a contrast has a zero gradient; that is no error.
        return self._total(batch, counted if len(counted) else rows[:1], weights)

    def _training_losses(self, batch: RolloutBatch) -> Iterator[Loss]:
        return self._total(batch, with_advantage(batch), self._training_weights(batch))

    def _total(self, batch: RolloutBatch, rows: Tensor, weights: Tensor) -> Iterator[Loss]:
        layout = best_layout(self.policy, "tangent")
        return total_losses(self.policy, batch, rows, weights, self.config.actor.token_budget, layout)

    def _training_weights(self, batch: RolloutBatch) -> Tensor:
        """float[R, T]: what multiplies each log-prob in the batch's policy gradient loss."""
        assert batch.advantages is not None
        mask = batch.response_mask
        denominator = Denominator.of(mask, self.config.rollout.max_new_tokens)
        return -batch.advantages * token_weights(mask, self.config.algorithm.aggregation, denominator)

    def _score(self, batch: RolloutBatch) -> Tensor:
        """float64[R]; a response without an advantage has no gradient and scores 0."""
        rows, weights = with_advantage(batch), self._training_weights(batch)
        layout = best_layout(self.policy, self.selector.method)
        budget = self.config.actor.token_budget
        scores = self.selector.score(pieces(self.policy, batch, rows, weights, budget, layout), len(batch))
        unscored = torch.ones(len(batch), dtype=torch.bool)
        unscored[rows] = False
        return scores.masked_fill(unscored, 0.0)


def all_rows(batch: RolloutBatch) -> Tensor:
    return torch.arange(len(batch))
