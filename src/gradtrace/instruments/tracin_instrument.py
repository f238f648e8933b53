"""TracIn selection inside the training loop: score, select, log, store.

Scores are taken once per training step, before its first update, at the weights that sampled the batch: one
forward-mode pass (or one backward pass without weight gradients) over the responses that have an advantage. The update
then runs forward and backward on the kept responses alone, so a dropped response costs its score and nothing more.

A response's training loss is its own term −Σ_t w_t A_t ℓ_t of the policy gradient, w as the run aggregates tokens: at
the weights that sampled it, every policy loss of ours has this gradient. KL and entropy terms do not depend on
rewards and are left out. The scores of a batch add up to ⟨∇L_val, ∇L_train⟩.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gradtrace.algorithms import Denominator, token_weights
from gradtrace.attribution.tangent import norm
from gradtrace.batch import RolloutBatch
from gradtrace.config import Config, TracinConfig
from gradtrace.instruments.columns import Truth, no_truth
from gradtrace.instruments.tracin import Loss, TracInSelector
from gradtrace.instruments.tracin_columns import (
    TracinStep,
    describe,
    layer_norms,
    tracin_columns,
    tracin_metrics,
)
from gradtrace.instruments.tracin_diagnosis import bootstrap_interval, diagnose
from gradtrace.instruments.tracin_losses import (
    best_layout,
    has_signal,
    pieces,
    total_losses,
    validation_weights,
    with_advantage,
)
from gradtrace.instruments.tracin_rules import RuleOptions, Selected, select
from gradtrace.instruments.tracin_validation import ValidationSource, without_prompts
from gradtrace.trace.writer import TraceWriter
from gradtrace.training.observer import StepObserver
from gradtrace.training.optimizer import Optimizer
from gradtrace.training.policy import Policy

logger = logging.getLogger(__name__)

VALIDATION_PARTS = 8
"""Parts of the validation set that the bootstrap of a diagnosis draws from."""


class TracinInstrument(StepObserver):
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
        self.settings: TracinConfig = config.trainer.tracin
        self.policy = policy
        self.optimizer = optimizer
        self.source = source
        self.writer = writer
        self.truth = truth
        self.report = report
        self.selector = TracInSelector(policy.model, self.settings.method, self.settings.parameters)
        self.meta = (meta or {}) | describe(self.settings, self.selector.method)
        self.rule = RuleOptions(
            self.settings.min_positive_ratio,
            self.settings.fallback_fraction,
            self.settings.top_fraction,
            self.settings.drop_share,
            self.settings.soft_temperature,
        )
        self._said: set[str] = set()
        self._step: TracinStep | None = None

    def start(self, last_step: int) -> None:
        if self.writer is not None:
            self.writer.truncate_after(last_step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()

    def state(self) -> dict[str, Tensor]:
        return {f"tracin/{name}": tensor for name, tensor in self.source.state().items()}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        prefix = "tracin/"
        self.source.load_state(
            {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
        )

    # ------------------------------------------------------------ the step

    def before_update(self, batch: RolloutBatch, step: int) -> RolloutBatch:
        begin = time.perf_counter()
        validation, generated = self.source.at(step)
        sampled = time.perf_counter()
        val_batch, overlap = without_prompts(validation.batch, batch.prompts)
        every = self.settings.diagnose_every
        result = TracinStep(
            validation=val_batch,
            validation_step=validation.step,
            generated=generated,
            overlap=overlap,
            scores=torch.zeros(len(batch), dtype=torch.float64),
        )
        if overlap:
            self._say_once(
                "overlap",
                f"step {step}: {overlap} validation prompts are in the training batch too and were left out: a "
                "response must not be scored against its own prompt. (Shown once; tracin/val_overlap counts them.)",
            )
        if not has_signal(val_batch):
            self._say(step, "the validation set has no prompt whose responses differ in reward")
        elif not has_signal(batch):
            self._say(step, "no response of the training batch has an advantage")
        elif every and (step % every == 0 or step == 1):
            self._score_in_parts(batch, val_batch, result, seed=step)
        else:
            self.selector.set_validation(self._validation_losses(val_batch, all_rows(val_batch)))
            self._keep_gradient(result)
            self._precondition()
            result.scores = self._score(batch)
        result.selected = self._select(result, step)
        result.seconds = {"tracin": time.perf_counter() - begin, "tracin_gen": sampled - begin}
        self._step = result
        return self._apply(batch, result.selected)

    def _select(self, result: TracinStep, step: int) -> Selected:
        """Overridden by baselines that choose otherwise."""
        selected = select(result.scores, self.settings.selection, self.rule)
        if selected.fallback:
            self._say_once("fallback", f"step {step}: {selected.note}. (Shown once; tracin/fallback counts.)")
        return selected

    def _apply(self, batch: RolloutBatch, selected: Selected) -> RolloutBatch:
        if self.settings.selection == "soft":
            assert batch.advantages is not None
            batch = batch.replace(advantages=batch.advantages * selected.weight[:, None])
        return batch.replace(kept=selected.kept)

    def _score_in_parts(
        self, batch: RolloutBatch, val_batch: RolloutBatch, result: TracinStep, seed: int
    ) -> None:
        """Scores as a sum over parts of the validation set, and from their spread an interval of each."""
        total: dict[str, Tensor] = {}
        scores, loss = [], 0.0
        for groups in torch.arange(len(val_batch.prompts)).chunk(VALIDATION_PARTS):
            rows = torch.isin(val_batch.group, groups).nonzero().squeeze(-1)
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
        parts = torch.stack(scores)
        result.scores = parts.sum(0)
        low, high = bootstrap_interval(parts.nan_to_num().numpy(), seed)
        result.low, result.high = torch.from_numpy(low), torch.from_numpy(high)
        result.diagnosis = diagnose(
            result.scores.numpy(),
            result.direction_norm,
            result.train_norm,
            low,
            high,
            len(val_batch.prompts),
            result.cosine,
        )
        for sentence in result.diagnosis:
            self._say_once(sentence.split(":")[0].lstrip("0123456789 "), f"step {seed}: {sentence}")

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

    # ------------------------------------------------------------ what the user sees

    def after_update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        result, self._step = self._step, None
        assert result is not None
        metrics = tracin_metrics(result, batch)
        if self.writer is not None:
            if step % self.settings.write_every == 0:
                self.writer.write(step, tracin_columns(batch, result, self.truth), self.meta | result.meta())
            metrics["tracin/write_errors"] = float(self.writer.stats.failed)
        return metrics

    def _say(self, step: int, why: str) -> None:
        self._say_once(
            why, f"step {step} keeps every response: {why}. (Shown once; tracin/no_signal counts.)"
        )

    def _say_once(self, key: str, line: str) -> None:
        if key not in self._said:
            self._said.add(key)
            self.report(f"tracin: {line}")


def all_rows(batch: RolloutBatch) -> Tensor:
    return torch.arange(len(batch))
