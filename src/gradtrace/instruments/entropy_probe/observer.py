"""The entropy probe inside training: ΔH of the optimizer step about to be taken, predicted, then measured.

Which step: the first optimizer step of a training step. Its gradient is complete and clipped, the weights are still
those that sampled; E is sampled from them there and then, from prompts that are never trained on. The prediction is
made before the weights move, the measurement right after, at the weights that the optimizer really made. Later
mini-batches of the same rollout are not probed: they start from other weights, and each would need its own E.

E is drawn from the full distribution whatever `rollout.top_p` is, with random numbers of its own. Training does not
notice: weights and random numbers are bit-identical with the probe on and off.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.config import EntropyProbeConfig
from gradtrace.errors import GradtraceError
from gradtrace.instruments.entropy_probe.columns import Probed
from gradtrace.instruments.entropy_probe.passes import Pass, TokenBatch, evaluation_batch
from gradtrace.instruments.entropy_probe.probe import EntropyProbe, Prediction, Shares
from gradtrace.instruments.observer import Backward, OptimizerStep, StepObserver
from gradtrace.metrics import GENERATED, Timer
from gradtrace.policy.optimizer import Optimizer
from gradtrace.policy.policy import Policy
from gradtrace.rollout import Sampler, SamplingParams
from gradtrace.tasks.base import Prompt
from gradtrace.trace.writer import TraceWriter

logger = logging.getLogger(__name__)


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


class EntropyProbeInstrument(StepObserver):
    def __init__(
        self,
        policy: Policy,
        optimizer: Optimizer,
        sampler: Sampler,
        prompts: list[Prompt],
        params: SamplingParams,
        settings: EntropyProbeConfig,
        seed: int,
        token_budget: int,
        writer: TraceWriter,
        meta: dict[str, Any] | None = None,
        report: Callable[[str], None] = logger.warning,
    ) -> None:
        """`prompts`: of E, held out of training; `params`: n, length and stop tokens of its responses."""
        if len(prompts) < 2:
            raise GradtraceError(
                f"trainer.entropy_probe needs at least 2 held-out prompts, the task has {len(prompts)}: give "
                "data.validation files, or a larger data.validation_fraction"
            )
        self.probe = EntropyProbe(policy.model, optimizer.adamw)
        self.policy = policy
        self.optimizer = optimizer
        self.sampler = sampler
        self.prompts = prompts
        self.params = params
        self.settings = settings
        self.seed = seed
        self.token_budget = token_budget
        self.writer = writer
        self.meta = meta or {}
        self.report = report
        self.errors = 0
        self._step: _Step | None = None

    def start(self, last_step: int) -> None:
        self.writer.truncate_after(last_step)

    def close(self) -> None:
        self.writer.close()

    # ------------------------------------------------------------ the step

    def before_update(self, batch: RolloutBatch, step: int) -> RolloutBatch:
        self._step = _Step(batch, step % self.settings.every == 0, torch.zeros(len(batch)))
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
        with self._guarded(), step.timer("entropy_probe"):
            self._predict(step, update)
        yield
        if step.predicted is not None:
            with self._guarded(), step.timer("entropy_probe"):
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
            raise GradtraceError(
                "all held-out prompts are in the rollout as well: nothing is left to evaluate on"
            )
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
    def _guarded(self) -> Iterator[None]:
        """A failing probe is shown and counted, and costs this step's probe; it does not cost the run."""
        try:
            yield
        except Exception as error:
            if self.settings.on_error == "raise":
                raise
            self.errors += 1
            self.report(f"entropy probe: this step is not probed: {error}")

    # ------------------------------------------------------------ the file

    def after_update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        own, self._step = self._step, None
        if own is None or not own.active:
            return {}
        metrics = {"entropy_probe/errors": float(self.errors)}
        probed = own.probed
        if probed is None:
            return metrics
        with self._guarded():
            self.writer.write(step, probed.columns(batch), self.meta | probed.meta(batch))
        return {
            **metrics,
            **probed.metrics(),
            "entropy_probe/write_errors": float(self.writer.stats.failed),
            "timing_s/entropy_probe": own.timer.seconds["entropy_probe"],
            GENERATED: float(len(probed.evaluation)),
        }
