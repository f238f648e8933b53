"""A step of TracIn selection: when to score, what to keep, log and store. Every host runs this one.

Scores are taken once per training step, before its first update, at the weights that sampled the batch. The update
then runs forward and backward on the kept responses alone, so a dropped response costs its score and nothing more.

A response's training loss is its own term −Σ_t w_t A_t ℓ_t of the policy gradient, w as the run aggregates tokens: at
the weights that sampled it, every policy loss of ours has this gradient. KL and entropy terms do not depend on
rewards and are left out. The scores of a batch add up to ⟨∇L_val, ∇L_train⟩.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.config import TracinConfig
from gradtrace.instruments.observer import TraceRecord, WritingObserver
from gradtrace.instruments.tracin.columns import TracinStep, describe, tracin_columns, tracin_metrics
from gradtrace.instruments.tracin.diagnosis import diagnose, spread_interval
from gradtrace.instruments.tracin.losses import (
    TokenWeights,
    Weighted,
    has_signal,
    training_losses,
    validation_losses,
)
from gradtrace.instruments.tracin.rules import Selected, select
from gradtrace.instruments.tracin.scores import Measures
from gradtrace.instruments.tracin.validation import ValidationSet, ValidationSource, without_prompts
from gradtrace.policy.rollouts import keep_groups
from gradtrace.trace.schema import TRACIN

PREFIX = "tracin/"
"""Our names in a checkpoint begin with this."""
VALIDATION_PARTS = 8
"""Parts of the validation set that the interval of a diagnosis comes from."""


@dataclass
class Sampled:
    """The validation rollouts of a step."""

    step: int = 0
    generated: int = 0
    """Responses that were sampled in this step."""
    seconds: float = 0.0
    trusted: int = 0
    """Validation responses at the end of the training batch: trained on, neither scored nor dropped."""


class TracinRecord(TraceRecord):
    """`config` is a `TracinConfig`."""

    kind = label = TRACIN


class Scorer(Protocol):
    """Whoever computes the scores: `ModelScorer` in this process, or a driver that asks its ranks."""

    @property
    def method(self) -> str:
        """How scores are computed: `tangent` or `ghost`."""

    def __call__(self, step: int, train: Weighted, parts: list[Weighted], measure: bool) -> tuple[Tensor, Measures]:
        """Scores of `train.rows` at the current weights; see `scores.score_parts`."""


@dataclass(eq=False)
class TracinInstrument(WritingObserver):
    record: TracinRecord
    scorer: Scorer
    weigh: TokenWeights
    """How the run's loss weighs tokens."""
    source: ValidationSource
    _step: TracinStep | None = field(default=None, init=False)
    _sampled: Sampled = field(default_factory=Sampled, init=False)

    def __post_init__(self) -> None:
        self.settings: TracinConfig = self.record.config
        self.writer = self.record.writer

    def state(self) -> dict[str, Tensor]:
        return {f"{PREFIX}{name}": tensor for name, tensor in self.source.state().items()}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        own = {k.removeprefix(PREFIX): t for k, t in tensors.items() if k.startswith(PREFIX)}
        self.source.load_state(own)

    # ------------------------------------------------------------ the step

    def more_rollouts(self, step: int) -> RolloutBatch | None:
        """The validation rollouts of the step that samples them, if they are trained on; later they are old."""
        if not self.settings.trains_on_validation:
            return None
        batch = self._sample(step).batch
        if not self._sampled.generated:
            return None
        self._sampled.trusted = len(batch)
        return batch

    def _sample(self, step: int) -> ValidationSet:
        if self._sampled.step != step:
            begin = time.perf_counter()
            _, generated = self.source.at(step)
            self._sampled = Sampled(step, generated, time.perf_counter() - begin)
        return self.source.at(step)[0]

    def _own(self, batch: RolloutBatch) -> RolloutBatch:
        """The batch without the validation rollouts at its end."""
        rows = len(batch) - self._sampled.trusted
        return keep_groups(batch, batch.group[:rows].unique()) if rows < len(batch) else batch

    def before_update(self, batch: RolloutBatch, step: int) -> RolloutBatch:
        validation = self._sample(step)
        begin, generated = time.perf_counter(), self._sampled.generated
        whole, batch = batch, self._own(batch)
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
            self.record.tell_once(
                "overlap",
                f"step {step}: {overlap} validation prompts are in the training batch too and were left out: a "
                "response must not be scored against its own prompt. (Shown once; tracin/val_overlap counts them.)",
            )
        if not has_signal(val_batch):
            self._say(step, "the validation set has no prompt whose responses differ in reward")
        elif not has_signal(batch):
            self._say(step, "no response of the training batch has an advantage")
        elif every and (step % every == 0 or step == 1):
            self._score_and_diagnose(batch, result, step)
        else:
            result.scores = self._scores(batch, [validation_losses(val_batch)], result, step, measure=False)[0]
        result.selected = self._select(result, step)
        spent, sampling = time.perf_counter() - begin, self._sampled.seconds
        result.seconds = {"tracin": spent + sampling, "tracin_gen": sampling}
        self._step = result
        return self._apply(whole, result.selected)

    def _select(self, result: TracinStep, step: int) -> Selected:
        """Overridden by baselines that choose otherwise."""
        selected = select(result.scores, self.settings.selection, self.settings)
        if selected.fallback:
            self.record.tell_once("fallback", f"step {step}: {selected.note}. (Shown once; tracin/fallback counts.)")
        return selected

    def _apply(self, batch: RolloutBatch, selected: Selected) -> RolloutBatch:
        trusted = self._sampled.trusted
        if self.settings.selection == "soft":
            weight = torch.cat([selected.weight, torch.ones(trusted)])
            batch = batch.replace(advantages=batch.need("advantages") * weight[:, None])
        return batch.replace(kept=torch.cat([selected.kept, torch.ones(trusted, dtype=torch.bool)]))

    def _scores(
        self, batch: RolloutBatch, parts: list[Weighted], result: TracinStep, step: int, measure: bool
    ) -> Tensor:
        """float64[K, R]: of each part of the validation set; a response without an advantage scores 0."""
        train = training_losses(batch, self.weigh)
        scores = torch.zeros(len(parts), len(batch), dtype=torch.float64)
        scores[:, train.rows], result.measures = self.scorer(step, train, parts, measure)
        return scores

    def _score_and_diagnose(self, batch: RolloutBatch, result: TracinStep, step: int) -> None:
        """Scores as a sum over parts of the validation set, and from their spread an interval of each."""
        validation = result.validation
        groups = torch.arange(len(validation.prompts)).chunk(VALIDATION_PARTS)
        rows = [torch.isin(validation.group, part).nonzero().squeeze(-1) for part in groups]
        losses = [validation_losses(validation, part) for part in rows]
        parts = self._scores(batch, losses, result, step, measure=True)
        result.scores = parts.sum(0)
        low, high = spread_interval(parts.nan_to_num().numpy())
        result.low, result.high = torch.from_numpy(low), torch.from_numpy(high)
        result.diagnosis = diagnose(
            result.scores.numpy(),
            result.measures.direction_norm,
            result.measures.train_norm,
            low,
            high,
            len(validation.prompts),
            result.measures.cosine,
        )
        for sentence in result.diagnosis:
            self.record.tell_once(sentence.split(":")[0].lstrip("0123456789 "), f"step {step}: {sentence}")

    # ------------------------------------------------------------ what the user sees

    def after_update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        result, self._step = self._step, None
        assert result is not None
        batch, result.trained = self._own(batch), self._sampled.trusted > 0
        metrics = tracin_metrics(result, batch, self.settings.preconditioner)
        if step % self.settings.write_every == 0:
            meta = self.record.meta | describe(self.settings, self.scorer.method) | result.meta()
            self.writer.write(step, tracin_columns(batch, result, self.record.truth), meta)
        return metrics | {"tracin/write_errors": float(self.writer.stats.failed)}

    def _say(self, step: int, why: str) -> None:
        self.record.tell_once(why, f"step {step} keeps every response: {why}. (Shown once; tracin/no_signal counts.)")
