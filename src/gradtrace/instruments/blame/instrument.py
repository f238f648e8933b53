"""Blame in processes that hold the whole model: the embedded loop and TRL.

A token's share of ‖g‖² is w_t⟨∇L_t, g⟩/‖g‖²: the derivative of its own loss term along the whole gradient, for all
tokens by one forward-mode pass before the optimizer step, over every trainable weight. The norms and sketches of
response gradients ride on the training backward pass, or take one of their own where responses share prompts there. As
with influence, shares are of the first epoch over a rollout.
On several ranks g is the mean of their gradients, and each shares out what the responses have that it trained on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from gradtrace.attribution.collectives import Ranks
from gradtrace.attribution.response_gradients import ResponseGradients
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.blame.shares import BlameRecord, StepBlame
from gradtrace.instruments.blame.sharing import Sharing, UsualNorms
from gradtrace.instruments.entropy_probe.model_host import ModelProbeHost
from gradtrace.instruments.observer import Backward, OptimizerStep, WritingObserver
from gradtrace.policy.policy import Policy

Coming = Callable[[], tuple[Mapping[str, Tensor], float] | None]
"""(the gradient that the optimizer is about to be given, what clipping multiplied it by); None: a host cannot say."""


class BlameInstrument(WritingObserver):
    def __init__(
        self,
        policy: Policy,
        record: BlameRecord,
        optimizer: torch.optim.Optimizer,
        coming: Coming,
        ranks: Ranks | None = None,
    ) -> None:
        self.policy = policy
        self.record = record
        self.writer = record.writer
        self.coming = coming
        self.ranks = ranks or Ranks()
        self.gradients = ResponseGradients(policy.model, record.config.sketch_dim)
        self.gradients.close()  # hooks are on the model during updates only: the sampler's fast path wants it bare
        measured = [block.parameter_name for block in self.gradients.blocks]
        self.sharing = Sharing(ModelProbeHost(policy.model, self.ranks), policy.model, optimizer, measured)
        self.usual = UsualNorms(record.config.unusual_ratio)
        self._now: StepBlame | None = None
        self._mask = torch.empty(0, dtype=torch.bool)
        self._weights = torch.empty(0)
        """float64[R]: what aggregation multiplied each response's token losses by, the mean over ranks included; 0 for
        those of other ranks."""
        self._backward: Backward | None = None
        """The last pass of the update."""
        self._seconds = 0.0
        self._due = False
        self._largest = 0.0
        """Norm among this step's optimizer steps."""

    @property
    def last(self) -> StepBlame | None:
        """Of the step that `after_update` was last called for; None if it was not taken."""
        return self.record.last

    def close(self) -> None:
        self.gradients.close()
        super().close()

    def before_update(self, batch: RolloutBatch, step: int) -> RolloutBatch:
        self._now, self._seconds, self._largest = StepBlame.of(batch), 0.0, 0.0
        self._mask = batch.response_mask
        self._weights = torch.zeros(len(batch), dtype=torch.float64)
        self._due = self.record.is_due(step)
        if self._due:
            self.gradients.attach()
        return batch

    def around_backward(self, backward: Backward) -> AbstractContextManager[Any]:
        if self._now is None or backward.update.epoch > 0:
            return nullcontext()
        micro = backward.micro
        self._backward = backward
        self._weights[micro.rows] = backward.token_weights.amax(1).double().cpu() / self.ranks.size
        self._now.optimizer_step[micro.rows] = backward.number
        if not self._due or micro.shares_prompts:
            return nullcontext()
        return self.gradients.capture(response=micro.response, tokens=micro.tokens)

    @contextmanager
    def around_optimizer_step(self, update: OptimizerStep) -> Iterator[None]:
        if self._now is not None and update.epoch == 0:
            with self._guarded():
                self._measure_apart(update.rows)
                self._share_out(self._now, update)
        yield

    def step_skipped(self, update: OptimizerStep) -> None:
        """There is nothing to share out, but the norms of single responses say whose gradient was not finite."""
        if self._now is not None and update.epoch == 0:
            with self._guarded():
                self._measure_apart(update.rows)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """What happens inside is timed, and an error costs this step's blame, not the run."""
        begin = time.perf_counter()
        try:
            yield
        except Exception as error:
            self._now = None
            self.record.failed(error)
        self._seconds += time.perf_counter() - begin

    def _share_out(self, blame: StepBlame, update: OptimizerStep) -> None:
        coming, backward = self.coming(), self._backward
        if coming is None or backward is None:
            return
        gradient, clip_factor = coming
        norm = self.sharing.norm(gradient, clip_factor)
        wanted = self.usual.is_unusual(norm) or self._due
        self._largest = max(self._largest, norm)
        if not norm or not wanted:
            return
        rows = update.rows.sort().values
        own = rows[self._weights[rows] > 0]
        weights = self._weights[own].repeat_interleave(self._mask[own].sum(1))

        def weighted() -> Tensor:
            if not len(own):
                return torch.zeros(2, 0)
            losses, log_probs = backward.token_terms(own)
            return torch.stack([losses * weights.to(losses), log_probs])

        found, about = self.sharing.share_out(weighted, gradient, clip_factor, update.number)
        for theirs, values in self.ranks.gather((own, found)):
            tokens = torch.zeros_like(self._mask)  # that the policy wrote of their responses
            tokens[theirs] = self._mask[theirs]
            blame.put(tokens, values)
        blame.updates.append(about)

    def _measure_apart(self, rows: Tensor) -> None:
        """Where responses shared prompts: norms and sketches of these rows in passes in which each has its prompt to
        itself; the gradients go nowhere else."""
        backward = self._backward
        if not self._due or backward is None or backward.passes is None or not backward.micro.shares_prompts:
            return
        for micro, run in backward.passes(rows):
            around = self.gradients.capture(response=micro.response, tokens=micro.tokens)
            with around, self.policy.own_pass() as ends:
                losses = run()[0]
                weights = (self._weights[micro.rows, None] * micro.mask * self.ranks.size).to(losses)
                torch.autograd.grad((losses * weights).sum(), ends)

    def after_update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        blame, self._now, self._backward = self._now, None, None
        self.gradients.close()
        norms, sketches = self.gradients.take()
        own = None if blame is None else blame.optimizer_step
        for found, pictures, steps in self.ranks.gather((norms, sketches, own)):
            if blame is None or steps is None:
                continue
            blame.optimizer_step = torch.maximum(blame.optimizer_step, steps)
            for row, norm in found.items():  # as parts of the mean over ranks
                blame.norm[row] = norm / self.ranks.size
                blame.sketch[row] = pictures[row] / self.ranks.size
        return self.record.write(batch, step, blame, self._largest, self._seconds)
