"""Influence trace: which tokens of a rollout pushed towards the accepted answers, on the real training backward.

When scores are taken: in the first epoch over a rollout, mini-batch by mini-batch, before the optimizer step of
that mini-batch. A group lies within one mini-batch, so its scores are all of one θ; `optimizer_step` of each row
says how many steps on this rollout had been taken before (0: the weights that sampled it). Taking every
score at the first θ instead would cost a pass of its own; here the trace rides on the pass that training makes
anyway. With `all_selected` the scope is therefore the selected responses of one mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradtrace.attribution import InfluenceTracer, TrainingPass
from gradtrace.attribution.ledger import Role
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.influence.capture import InfluenceCapture, TracedPass
from gradtrace.instruments.influence.record import InfluenceRecord
from gradtrace.instruments.observer import Backward, OptimizerStep, StepObserver
from gradtrace.policy.microbatch import MicroBatch, Sequences
from gradtrace.policy.policy import Policy


@dataclass(eq=False)
class StepState:
    """What is known of the training step that is being traced."""

    batch: RolloutBatch
    step: int
    update: OptimizerStep | None = None
    """The optimizer step whose passes are being captured."""
    token_terms: Callable[[Tensor], Tensor] | None = None
    """Rows → their tokens' own terms of the training loss and their log-probs, as the last pass gave it."""
    failure: Exception | None = None


Coming = Mapping[str, Tensor] | bool | None
"""The gradient that the optimizer is about to be given: as it stands in `.grad`, by parameter name, or not known."""


class InfluenceTraceInstrument(StepObserver):
    """The trace in a process that holds the whole model: the embedded loop and TRL."""

    def __init__(
        self,
        policy: Policy,
        record: InfluenceRecord,
        loss: TrainingPass,
        optimizer: Any,
        coming: Callable[[], Coming] = lambda: True,
    ) -> None:
        """`optimizer` takes the steps; `coming` says what is known of its next gradient when a mini-batch is scored."""
        self.policy = policy
        self.record = record
        self.config = record.config
        self.coming = coming
        self.tracer = InfluenceTracer(policy.model, self.config, defer_errors=True, optimizer=optimizer)
        self.tracer.close()  # hooks are on the model during updates only: the sampler's fast path wants it bare
        self.capture = InfluenceCapture(self.tracer, loss)
        self._step: StepState | None = None

    def start(self, last_step: int) -> None:
        self.record.writer.truncate_after(last_step)

    def close(self) -> None:
        self.tracer.close()
        self.record.writer.close()

    # ------------------------------------------------------------ the step

    def before_update(self, batch: RolloutBatch, step: int) -> RolloutBatch:
        self.needs_entropies = step % self.config.write_every == 0
        if self.needs_entropies:
            self.tracer.attach()
            self._step = StepState(batch, step)
            self.capture.start(self.record.plan(batch, step))
        return batch

    def around_backward(self, backward: Backward) -> AbstractContextManager[Any]:
        state = self._step
        if state is None or state.failure is not None or backward.update.epoch > 0:
            return nullcontext()
        if state.update is not backward.update:
            self.capture.begin(backward.update.rows, backward.update.number)
            state.update = backward.update
        traced = self._traced(backward)
        if not self.capture.holds(traced):
            return nullcontext()
        state.token_terms = backward.token_terms
        roles = self.capture.roles(backward.number)
        with self._guarded():
            for role in roles.own:
                with self.capture.around(traced, role, rides=False):
                    self._own_backward(role, backward.micro)
        if roles.riding is None or state.failure is not None:
            return nullcontext()
        return self.capture.around(traced, roles.riding, rides=True)

    def _traced(self, backward: Backward) -> TracedPass:
        micro = backward.micro
        head = self.policy.model.get_output_embeddings()  # the policy runs it on response positions only
        heads = [name for name, module in self.policy.model.named_modules() if module is head]
        return TracedPass(
            rows=micro.rows,
            response=micro.response,
            tokens=micro.tokens,
            token_weight=backward.token_weights[:, 0],
            optimizer_step=backward.number,
            positions=dict.fromkeys(heads, micro.logit_positions),
        )

    def _own_backward(self, role: Role, micro: MicroBatch) -> None:
        """A pass of the objective's own. Gradients go nowhere: autograd.grad, and the result is dropped."""
        weights = [block.sites[0].module.weight for block in self.tracer.blocks]
        terms, _ = self._weighted_log_probs(role, micro)
        torch.autograd.grad(terms.sum(), weights, allow_unused=True)  # type: ignore[arg-type]

    def _weighted_log_probs(self, role: Role, micro: MicroBatch) -> Tensor:
        """[2, N]: every token's own term of a log-prob objective, and its log-prob."""
        assert self._step is not None
        advantages = micro.column(self._step.batch, "advantages", torch.device("cpu"))
        weights = self.capture.weights(role, micro.mask, micro.rows, advantages)
        log_probs = self.policy.statistics(micro)[0]
        return torch.stack([weights[micro.mask].to(log_probs) * log_probs, log_probs])

    @contextmanager
    def around_optimizer_step(self, update: OptimizerStep) -> Iterator[None]:
        state = self._step
        if state is not None and state.update is update and state.failure is None:
            with self._guarded():
                terms = self._terms if self.config.wants_loss_term else None
                self.capture.score(terms=terms, coming=self.coming())
        yield

    def _terms(self, responses: list[int]) -> Tensor:
        """[2, N]: every token's own term of the step, to be raised, and its log-prob."""
        assert self._step is not None and self._step.token_terms is not None
        assert self.capture.current is not None
        rows = self.capture.current.rows[responses]
        if self.config.output_function != "training_loss":
            return self._weighted_log_probs("step", Sequences.of(self._step.batch).padded(rows))
        losses, log_probs = self._step.token_terms(rows)
        return torch.stack([-losses, log_probs])

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """An error inside costs this step's trace, not the run."""
        try:
            yield
        except Exception as error:
            if self.config.on_error == "raise":
                raise
            assert self._step is not None
            self._step.failure = error
            self.tracer.reset()

    def after_update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        state, self._step = self._step, None
        if state is None:
            return {}
        self.tracer.close()
        capture = self.capture
        if state.failure is None:
            capture.drop_unscored()
            try:
                return self.record.write(batch, capture.scored, capture.status, step)
            except Exception as error:
                if self.config.on_error == "raise":
                    raise
                state.failure = error
        return self.record.failed(state.failure, capture.status, step)
