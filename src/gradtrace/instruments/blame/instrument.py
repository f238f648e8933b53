"""Blame in a process that holds the whole model: the embedded loop and TRL.

A token's share of ‖g‖² is w_t⟨∇L_t, g⟩/‖g‖²: the derivative of its own loss term along the whole gradient, for all
tokens by one forward-mode pass before the optimizer step, over every trainable weight. The norms and sketches of
response gradients ride on the training backward pass. As with influence, shares are of the first epoch over a rollout.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gradtrace.attribution import directional_derivative
from gradtrace.attribution.response_gradients import ResponseGradients
from gradtrace.attribution.tangent import norm as length
from gradtrace.batch import RolloutBatch
from gradtrace.config import BlameConfig
from gradtrace.instruments.blame.shares import StepBlame, blame_columns, blame_metrics, move_parts
from gradtrace.instruments.columns import Truth, no_truth
from gradtrace.instruments.observer import Backward, OptimizerStep, StepObserver
from gradtrace.instruments.padding_row import padding_row_is_constant
from gradtrace.policy.policy import Policy
from gradtrace.trace.writer import TraceWriter

WINDOW, ENOUGH = 40, 8
"""Optimizer steps whose norms say what is usual, and how many of them it takes."""
Coming = Callable[[], tuple[Mapping[str, Tensor], float] | None]
"""(the gradient that the optimizer is about to be given, what clipping multiplied it by); None: a host cannot say."""


class BlameInstrument(StepObserver):
    def __init__(
        self,
        policy: Policy,
        config: BlameConfig,
        writer: TraceWriter,
        optimizer: torch.optim.Optimizer,
        coming: Coming,
        meta: dict[str, Any],
        report: Callable[[str], None],
        truth: Truth = no_truth,
    ) -> None:
        self.policy = policy
        self.config = config
        self.writer = writer
        self.optimizer = optimizer
        self.coming = coming
        self.meta = meta
        self.report = report
        self.truth = truth
        self.errors = 0
        self.last: StepBlame | None = None
        """Of the step that `after_update` was last called for; None if it was not taken."""
        self.gradients = ResponseGradients(policy.model, config.sketch_dim)
        self.gradients.close()  # hooks are on the model during updates only: the sampler's fast path wants it bare
        self._now: StepBlame | None = None
        self._mask = torch.empty(0, dtype=torch.bool)
        self._weights = torch.empty(0)
        """float64[R]: what aggregation multiplied each response's token losses by."""
        self._terms: Callable[[Tensor], Tensor] | None = None
        self._seconds = 0.0
        self._due = False
        """This step is shared out whatever its gradient is like, with the gradients of its responses."""
        self._norms: deque[float] = deque(maxlen=WINDOW)
        """Of the last optimizer steps."""
        self._largest = 0.0
        """Norm among this step's optimizer steps."""

    def start(self, last_step: int) -> None:
        self.writer.truncate_after(last_step)

    def close(self) -> None:
        self.gradients.close()
        self.writer.close()

    # ------------------------------------------------------------ the step

    def before_update(self, batch: RolloutBatch, step: int) -> RolloutBatch:
        self._now, self._seconds, self._largest = StepBlame.of(batch), 0.0, 0.0
        self._mask = batch.response_mask
        self._weights = torch.zeros(len(batch), dtype=torch.float64)
        self._due = step % self.config.write_every == 0
        if self._due:
            self.gradients.attach()
        return batch

    def around_backward(self, backward: Backward) -> AbstractContextManager[Any]:
        if self._now is None or backward.update.epoch > 0:
            return nullcontext()
        micro = backward.micro
        self._terms = backward.token_terms
        self._weights[micro.rows] = backward.token_weights.amax(1).double().cpu()
        self._now.optimizer_step[micro.rows] = backward.number
        return (
            self.gradients.capture(response=micro.response, tokens=micro.tokens)
            if self._due
            else nullcontext()
        )

    @contextmanager
    def around_optimizer_step(self, update: OptimizerStep) -> Iterator[None]:
        if self._now is not None and update.epoch == 0:
            begin = time.perf_counter()
            with self._guarded():
                self._share_out(self._now, update)
            self._seconds += time.perf_counter() - begin
        yield

    def _share_out(self, blame: StepBlame, update: OptimizerStep) -> None:
        coming = self.coming()
        if coming is None or self._terms is None:
            return
        gradient, clip_factor = coming
        rows = update.rows.sort().values
        square = length(gradient.values()) ** 2
        norm = square**0.5 / clip_factor
        wanted = self._due or self._is_unusual(norm)
        self._norms.append(norm)
        self._largest = max(self._largest, norm)
        if not square or not wanted:
            return
        terms, values = self._terms, []

        def run() -> Tensor:
            made = terms(rows)
            values.append(forward_ad.unpack_dual(made).primal)
            return made

        with padding_row_is_constant(self.policy.model):
            changes = directional_derivative(self.policy.model, run, gradient).double().cpu()
        mask = torch.zeros_like(self._mask)
        mask[rows] = self._mask[rows]
        owner = rows.repeat_interleave(self._mask[rows].sum(1))
        blame.share[mask] = changes[0] * self._weights[owner] / square * clip_factor
        blame.push[mask] = -changes[1] / clip_factor
        blame.log_probs[mask] = values[0][1].double().cpu()
        parameters = dict(self.policy.model.named_parameters())
        names = [b.parameter_name for b in self.gradients.blocks if b.parameter_name in gradient]
        covered = length(gradient[name] for name in names) ** 2 if names else 0.0
        blame.updates.append(
            {
                "number": update.number,
                "grad_norm": norm,
                "clip_factor": clip_factor,
                "residual": 1.0 - float(blame.share[rows].sum()),
                "norm_coverage": covered / square,
                **move_parts(self.optimizer, parameters, gradient),
            }
        )

    def _is_unusual(self, norm: float) -> bool:
        ratio = self.config.unusual_ratio
        return ratio > 0 and len(self._norms) >= ENOUGH and norm > ratio * median(self._norms)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """An error inside costs this step's blame, not the run."""
        try:
            yield
        except Exception as error:
            if self.config.on_error == "raise":
                raise
            self.errors += 1
            self._now = None
            self.report(f"blame: this step's gradient is not shared out: {error}")

    # ------------------------------------------------------------ the file

    def after_update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        blame, self._now, self.last = self._now, None, None
        self.gradients.close()
        norms, sketches = self.gradients.take()
        metrics = {"blame/errors": float(self.errors), "blame/write_errors": float(self.writer.stats.failed)}
        if self._largest:
            metrics["blame/largest_grad_norm"] = self._largest
        if blame is None or not (self._due or blame.updates):
            return metrics
        if not self._due:  # of an unusual step only the optimizer steps that were
            taken = torch.tensor([int(update["number"]) for update in blame.updates])
            blame.optimizer_step[~torch.isin(blame.optimizer_step, taken)] = -1
        for row, norm in norms.items():
            blame.norm[row] = norm
        blame.sketch = sketches
        made = {int(update["number"]) for update in blame.updates}
        blame.skipped = sorted(set(blame.optimizer_step[blame.rows].tolist()) - made)
        meta = self.meta | {"updates": blame.updates, "skipped": blame.skipped}
        self.writer.write(step, blame_columns(batch, blame, self.truth), meta)
        self.last = blame
        return {**blame_metrics(batch, blame), **metrics, "timing_s/blame": self._seconds}
