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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.instruments.entropy_probe.columns import probe_columns, probe_meta, probe_metrics
from gradtrace.instruments.entropy_probe.estimates import Measured, Tokens, covariance_change
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


@dataclass(frozen=True)
class ProbeSettings:
    every: int
    seed: int
    token_budget: int
    on_error: str = "warn"


@dataclass(frozen=True, eq=False)
class _Probed:
    """What is known of a step between its prediction and its file."""

    rows: Tensor
    """long[r]: U, ascending."""
    evaluation: RolloutBatch
    prediction: Prediction
    shares: Shares
    rate: float
    measured: Measured | None = None
    after: Tokens | None = None


class EntropyProbeInstrument(StepObserver):
    def __init__(
        self,
        policy: Policy,
        optimizer: Optimizer,
        sampler: Sampler,
        prompts: list[Prompt],
        params: SamplingParams,
        settings: ProbeSettings,
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
        self.writer = writer
        self.meta = meta or {}
        self.report = report
        self.errors = 0
        self._active = False

    def start(self, last_step: int) -> None:
        self.writer.truncate_after(last_step)

    def close(self) -> None:
        self.writer.close()

    # ------------------------------------------------------------ the step

    def before_update(self, batch: RolloutBatch, step: int) -> RolloutBatch:
        self._active = step % self.settings.every == 0
        self._batch = batch
        self._weights = torch.zeros(len(batch))  # what aggregation multiplies the tokens of each response by
        self._probed: _Probed | None = None
        self._timer = Timer()
        return batch

    def around_backward(self, backward: Backward) -> AbstractContextManager[Any]:
        if self._active and backward.update.number == 0:
            self._weights[backward.micro.rows] = backward.token_weights[:, 0].cpu()
            self._token_losses = backward.token_losses
        return nullcontext()

    @contextmanager
    def around_optimizer_step(self, update: OptimizerStep) -> Iterator[None]:
        active = self._active and update.number == 0
        if active:
            with self._guarded(), self._timer("entropy_probe"):
                self._predict(update)
        yield
        if active and self._probed is not None:
            with self._guarded(), self._timer("entropy_probe"):
                self._measure(self._probed)

    def _predict(self, update: OptimizerStep) -> None:
        rows = update.rows.sort().values
        evaluation = self._sample(update.step)
        E = evaluation_batch(self.policy, evaluation, self.settings.token_budget)
        gradient = {name: p.grad for name, p in self.probe.parameters.items() if p.grad is not None}
        step = self.probe.update_of(gradient, self.optimizer.clip_factor)
        prediction = self.probe.predict(E, step)
        shares = self.probe.shares(prediction, E, step, self._terms(rows))
        rate = float(self.optimizer.adamw.param_groups[0]["lr"])
        self._probed = _Probed(rows, evaluation, prediction, shares, rate)

    def _measure(self, probed: _Probed) -> None:
        E = evaluation_batch(self.policy, probed.evaluation, self.settings.token_budget)
        after = self.probe.tokens(E)
        measured = self.probe.compare(probed.prediction, after)
        self._probed = _Probed(
            probed.rows, probed.evaluation, probed.prediction, probed.shares, probed.rate, measured, after
        )

    def _sample(self, step: int) -> RolloutBatch:
        """E, from the weights as they are, without the prompts of this rollout."""
        trained = {tuple(prompt) for prompt in self._batch.prompts}
        prompts = [prompt.ids for prompt in self.prompts if tuple(prompt.ids) not in trained]
        if len(prompts) < 2:
            raise GradtraceError(
                "all held-out prompts are in the rollout as well: nothing is left to evaluate on"
            )
        generator = torch.Generator().manual_seed(1_000_003 * self.settings.seed + step)
        return self.sampler.generate(prompts, self.params, generator=generator)

    def _terms(self, rows: Tensor) -> TokenBatch:
        """U: the loss terms of the mini-batch that the gradient is of."""
        lengths = self._batch.response_lengths[rows]
        weights = self._weights[rows].repeat_interleave(lengths)
        token_losses = self._token_losses

        def run() -> Tensor:
            losses = token_losses(rows)  # runs the model a micro-batch at a time
            return losses * weights.to(losses)

        one = Pass(torch.arange(len(rows)), run)
        return TokenBatch(lengths, self._batch.group[rows], lambda: [one])

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """A failing probe is shown and counted, and costs this step's probe; it does not cost the run."""
        try:
            yield
        except Exception as error:
            if self.settings.on_error == "raise":
                raise
            self.errors += 1
            self._probed = None
            self.report(f"entropy probe: this step is not probed: {error}")

    # ------------------------------------------------------------ the file

    def after_update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        if not self._active:
            return {}
        metrics = {"entropy_probe/errors": float(self.errors)}
        probed, self._probed = self._probed, None
        if probed is None or probed.measured is None or probed.after is None:
            return metrics
        with self._guarded():
            self._write(batch, step, probed)
        return {
            **metrics,
            **probe_metrics(probed.prediction, probed.measured, probed.shares),
            "entropy_probe/write_errors": float(self.writer.stats.failed),
            "timing_s/entropy_probe": self._timer.seconds["entropy_probe"],
            GENERATED: float(len(probed.evaluation)),
        }

    def _write(self, batch: RolloutBatch, step: int, probed: _Probed) -> None:
        assert probed.measured is not None and probed.after is not None
        columns = probe_columns(
            batch, probed.rows, probed.shares, probed.evaluation, probed.prediction, probed.after
        )
        covariance = covariance_change(
            batch.old_log_probs[probed.rows][batch.response_mask[probed.rows]],  # type: ignore[index]
            batch.advantages[probed.rows][batch.response_mask[probed.rows]],  # type: ignore[index]
            probed.rate,
        )
        meta = probe_meta(probed.prediction, probed.measured, probed.shares, covariance)
        self.writer.write(step, columns, self.meta | meta | {"learning_rate": probed.rate})
