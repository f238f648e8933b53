"""TracIn beside the batch: when to score, and what to keep.

Scores are taken once per training step, before its first update, at the weights that sampled the batch. The update
then runs forward and backward on the kept responses alone, so a dropped response costs its score and nothing more.

A response's training loss is its own term −Σ_t w_t A_t ℓ_t of the policy gradient, w as the run aggregates tokens: at
the weights that sampled it, every policy loss of ours has this gradient. KL and entropy terms do not depend on
rewards and are left out. The scores of a batch add up to ⟨∇L_val, ∇L_train⟩.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.instruments.contract import Reporter, Samples, Table, TrainingRun
from gradtrace.instruments.record import Record
from gradtrace.instruments.tracin import TRACIN, TracinConfig
from gradtrace.instruments.tracin.columns import Measures, TracinStep, describe, joint, tracin_columns, tracin_metrics
from gradtrace.instruments.tracin.diagnosis import diagnose, spread_interval
from gradtrace.instruments.tracin.losses import Weighted, has_signal, training_losses, validation_losses
from gradtrace.instruments.tracin.observer import Question
from gradtrace.instruments.tracin.rules import Selected, select
from gradtrace.instruments.tracin.validation import ValidationSource, without_prompts
from gradtrace.policy.rollouts import keep_groups

PREFIX = "tracin/"
"""Our names in a checkpoint begin with this."""
VALIDATION_PARTS = 8
"""Parts of the validation set that the interval of a diagnosis comes from."""


class TracinReporter(Reporter):
    def __init__(self, record: Record, run: TrainingRun) -> None:
        self.record = record
        self.run = run
        self.settings: TracinConfig = record.settings
        self.source = ValidationSource.of(self.settings, run)
        self.trains_on_validation = self.settings.trains_on_validation and "more_rollouts" not in run.cannot
        if self.trains_on_validation and self.settings.train_on_validation is None:
            run.report(
                "tracin: validation rollouts are trained on, too. Prompts that must stay held out: "
                f"{run.setting('tracin')}.train_on_validation=false."
            )
        self.method = ""
        """How scores are computed: `tangent` or `ghost`; known when they were first asked for."""
        self._generated = 0
        """Validation responses that were sampled for this step."""
        self._trusted = 0
        """Validation responses at the end of the training batch: trained on, neither scored nor dropped."""
        self._step: TracinStep | None = None

    def state(self) -> dict[str, Tensor]:
        return {f"{PREFIX}{name}": tensor for name, tensor in self.source.state().items()}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        own = {k.removeprefix(PREFIX): t for k, t in tensors.items() if k.startswith(PREFIX)}
        self.source.load_state(own)

    # ------------------------------------------------------------ the step

    def samples(self, step: int) -> Samples | None:
        self._generated = self._trusted = 0
        return self.source.samples(step)

    def more_rollouts(self, step: int, sampled: RolloutBatch | None) -> RolloutBatch | None:
        """The validation rollouts of the step that samples them, if they are trained on; later they are old."""
        self._take(step, sampled)
        if not self.trains_on_validation or not self._generated or self.source.current is None:
            return None
        self._trusted = len(self.source.current.batch)
        return self.source.current.batch

    def _take(self, step: int, sampled: RolloutBatch | None) -> None:
        if sampled is not None and not self._generated:
            self._generated = len(sampled)
            self.source.take(sampled, step)

    def _own(self, batch: RolloutBatch) -> RolloutBatch:
        """The batch without the validation rollouts at its end."""
        rows = len(batch) - self._trusted
        return keep_groups(batch, batch.group[:rows].unique()) if rows < len(batch) else batch

    def plan(self, batch: RolloutBatch, step: int, sampled: RolloutBatch | None) -> tuple[RolloutBatch, None]:
        self._take(step, sampled)
        begin, validation = time.perf_counter(), self.source.current
        assert validation is not None  # sampled before the first step
        whole, batch = batch, self._own(batch)
        val_batch, overlap = without_prompts(validation.batch, batch.prompts)
        every = self.settings.diagnose_every
        result = TracinStep(
            validation=val_batch,
            validation_step=validation.step,
            generated=self._generated,
            overlap=overlap,
            scores=torch.zeros(len(batch), dtype=torch.float64),
        )
        if overlap:
            self.record.say_once(
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
        result.selected = selected = select(result.scores, self.settings.selection, self.settings)
        if selected.fallback:
            self.record.say_once("fallback", f"step {step}: {selected.note}. (Shown once; tracin/fallback counts.)")
        result.seconds = {"tracin": time.perf_counter() - begin}
        self._step = result
        return self._apply(whole, selected), None

    def _apply(self, batch: RolloutBatch, selected: Selected) -> RolloutBatch:
        trusted = self._trusted
        if self.settings.selection == "soft":
            weight = torch.cat([selected.weight, torch.ones(trusted)])
            batch = batch.replace(advantages=batch.need("advantages") * weight[:, None])
        return batch.replace(kept=torch.cat([selected.kept, torch.ones(trusted, dtype=torch.bool)]))

    def _scores(
        self, batch: RolloutBatch, parts: list[Weighted], result: TracinStep, step: int, measure: bool
    ) -> Tensor:
        """float64[K, R]: of each part of the validation set; a response without an advantage scores 0."""
        train = training_losses(batch, self.run.token_weights)
        scores = torch.zeros(len(parts), len(batch), dtype=torch.float64)
        answer = self.run.ask(TRACIN, Question(train, parts, measure))
        for row, own in answer.columns["scores"].items():
            scores[:, row] = own
        result.measures, self.method = Measures(**answer.facts["measures"]), answer.facts["method"]
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
            self.record.say_once(sentence.split(":")[0].lstrip("0123456789 "), f"step {step}: {sentence}")

    # ------------------------------------------------------------ what the user sees

    def write(self, batch: RolloutBatch, step: int, table: Table | None) -> dict[str, float]:
        result, self._step = self._step, None
        assert result is not None
        batch, result.trained = self._own(batch), self._trusted > 0
        metrics = tracin_metrics(result, batch, self.settings.preconditioner)
        if step % self.settings.write_every == 0:
            self.method = self.method or self.run.ask(TRACIN, None).facts["method"]
            both = joint(batch, result)
            meta = describe(self.settings, self.method) | result.meta()
            self.record.write(step, both, torch.arange(len(both)), tracin_columns(batch, result), meta)
        return metrics | {"tracin/write_errors": self.record.write_errors}

    def _say(self, step: int, why: str) -> None:
        self.record.say_once(why, f"step {step} keeps every response: {why}. (Shown once; tracin/no_signal counts.)")
