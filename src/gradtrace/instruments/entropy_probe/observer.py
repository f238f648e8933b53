"""The entropy probe inside training: ΔH of the optimizer step about to be taken, predicted, then measured.

Which step: the first optimizer step of a training step. Its gradient is complete and clipped, the weights are still
those that sampled; E is sampled from them there and then, from prompts that are never trained on. The prediction is
made before the weights move, the measurement right after, at the weights that the optimizer really made. Later
mini-batches of the same rollout are not probed: they start from other weights, and each would need its own E.

E is drawn from the full distribution whatever `rollout.top_p` is, with random numbers of its own. Training does not
notice: weights and random numbers are bit-identical with the probe on and off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.instruments.entropy_probe.columns import Probed, ProbeRecord
from gradtrace.instruments.entropy_probe.passes import Pass, TokenBatch, evaluation_batch
from gradtrace.instruments.entropy_probe.probe import EntropyProbe, Prediction, Shares
from gradtrace.instruments.observer import Backward, OptimizerStep, WritingObserver
from gradtrace.metrics import GENERATED, Timer
from gradtrace.policy.optimizer import Optimizer
from gradtrace.policy.policy import Policy
from gradtrace.rollout import Sampler, SamplingParams
from gradtrace.tasks.base import Prompt


@dataclass(eq=False)
class _Step:
    """What is known of the step under way."""

    batch: RolloutBatch
    active: bool
    """Whether this step is probed."""
    weights: Tensor
    """float[R]: what aggregation multiplies the tokens of each response by."""
    token_terms: Callable[[Tensor], Tensor] | None = None
    predicted: tuple[Tensor, RolloutBatch, Prediction, Shares, float] | None = None
    """All of `Probed` but the measurement."""
    probed: Probed | None = None
    timer: Timer = field(default_factory=Timer)


@dataclass(eq=False)
class EntropyProbeInstrument(WritingObserver):
    policy: Policy
    optimizer: Optimizer
    sampler: Sampler
    prompts: list[Prompt]
    """Of E, held out of training."""
    params: SamplingParams
    """n, length and stop tokens of its responses."""
    seed: int
    token_budget: int
    record: ProbeRecord
    _step: _Step | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if len(self.prompts) < 2:
            raise GradtraceError(
                f"trainer.entropy_probe needs at least 2 held-out prompts, the task has {len(self.prompts)}: give "
                "data.validation files, or a larger data.validation_fraction"
            )
        self.probe = EntropyProbe(self.policy.model, self.optimizer.adamw)
        self.writer = self.record.writer

    # ------------------------------------------------------------ the step

    def before_update(self, batch: RolloutBatch, step: int) -> RolloutBatch:
        self._step = _Step(batch, self.record.is_due(step), torch.zeros(len(batch)))
        return batch

    def around_backward(self, backward: Backward) -> AbstractContextManager[Any]:
        step = self._step
        if step is not None and step.active and backward.update.number == 0:
            step.weights[backward.micro.rows] = backward.token_weights.amax(1).cpu()
            step.token_terms = backward.token_terms
        return nullcontext()

    @contextmanager
    def around_optimizer_step(self, update: OptimizerStep) -> Iterator[None]:
        step = self._step
        if step is None or not step.active or update.number:
            yield
            return
        with self._guarded(update.step), step.timer("entropy_probe"):
            self._predict(step, update)
        yield
        if step.predicted is not None:
            with self._guarded(update.step), step.timer("entropy_probe"):
                self._measure(step)

    def _predict(self, step: _Step, update: OptimizerStep) -> None:
        rows = update.rows.sort().values
        evaluation = self._sample(step.batch, update.step)
        E = evaluation_batch(self.policy, evaluation, self.token_budget)
        gradient = {name: p.grad for name, p in self.probe.parameters.items() if p.grad is not None}
        made = self.probe.update_of(gradient, self.optimizer.clip_factor)
        prediction = self.probe.predict(E, made)
        shares = self.probe.shares(prediction, E, made, self._terms(step, rows))
        rate = float(self.optimizer.adamw.param_groups[0]["lr"])
        step.predicted = rows, evaluation, prediction, shares, rate

    def _measure(self, step: _Step) -> None:
        assert step.predicted is not None
        rows, evaluation, prediction, shares, rate = step.predicted
        after = self.probe.tokens(evaluation_batch(self.policy, evaluation, self.token_budget))
        step.probed = Probed(rows, evaluation, prediction, shares, after, rate)

    def _sample(self, update: RolloutBatch, step: int) -> RolloutBatch:
        """E, from the weights as they are, without the prompts of this rollout."""
        trained = {tuple(prompt) for prompt in update.prompts}
        prompts = [prompt.ids for prompt in self.prompts if tuple(prompt.ids) not in trained]
        if len(prompts) < 2:
            raise GradtraceError("all held-out prompts are in the rollout as well: nothing is left to evaluate on")
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + step)
        return self.sampler.generate(prompts, self.params, generator=generator)

    def _terms(self, step: _Step, rows: Tensor) -> TokenBatch:
        """U: the loss terms of the mini-batch that the gradient is of."""
        lengths = step.batch.written_counts[rows]
        weights = step.weights[rows].repeat_interleave(lengths)
        token_terms = step.token_terms
        assert token_terms is not None

        def run() -> Tensor:
            losses, _ = token_terms(rows)  # runs the model a micro-batch at a time
            return losses * weights.to(losses)

        one = Pass(torch.arange(len(rows)), run)
        return TokenBatch(lengths, step.batch.group[rows], lambda: [one])

    @contextmanager
    def _guarded(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.record.failed(step, error)

    # ------------------------------------------------------------ the file

    def after_update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        own, self._step = self._step, None
        if own is None or not own.active:
            return {}
        metrics = self.record.write(batch, step, own.probed, own.timer.seconds["entropy_probe"])
        if own.probed is not None:
            metrics[GENERATED] = float(len(own.probed.evaluation))
        return metrics
