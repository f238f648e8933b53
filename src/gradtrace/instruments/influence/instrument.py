"""Influence trace: which tokens of a rollout pushed towards the accepted answers, on the real training backward.

When scores are taken: in the first epoch over a rollout, mini-batch by mini-batch, before the optimizer step of
that mini-batch. A group lies within one mini-batch, so its scores are all of one θ; `optimizer_step` of each row
says how many steps on this rollout had been taken before (0: the weights that sampled it). So the trace rides on
the pass that training makes anyway, and with `all_selected` the scope is the selected responses of one mini-batch.
With `scope_pass` the whole batch is scored at the first θ instead, in passes of its own before the first optimizer
step, and `all_selected` is the whole step.

Where responses share their prompt in training, the scores of the tail ride on its passes. The directions of loss terms,
which are of a contrast and not of the loss, take passes of their own before the optimizer step, for the groups that
they are about; and so does everything that needs the gradient of each response in its prompt, such as `position`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradtrace.attribution import AttributionError, InfluenceTracer, TrainingPass
from gradtrace.attribution.collectives import Ranks, is_sharded
from gradtrace.attribution.ledger import Role
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.influence.capture import InfluenceCapture, PassRoles, TracedPass
from gradtrace.instruments.influence.join import joined_over
from gradtrace.instruments.influence.record import InfluenceRecord
from gradtrace.instruments.observer import Backward, OptimizerStep, Passes, WritingObserver
from gradtrace.instruments.verify.in_training import TrainingCheck
from gradtrace.policy.microbatch import MicroBatch, Sequences
from gradtrace.policy.policy import Policy


@dataclass(eq=False)
class StepState:
    """What is known of the training step that is being traced."""

    batch: RolloutBatch
    step: int
    update: OptimizerStep | None = None
    """The optimizer step whose passes are being captured."""
    backward: Backward | None = None
    """The last pass, which tells rows' own terms of the training loss and their log-probs."""
    had_scope_pass: bool = False
    validity: dict[str, float] | None = None
    """What the check of this step found; None: it has not run."""
    failure: Exception | None = None


Coming = Mapping[str, Tensor] | bool | None
"""The gradient that the optimizer is about to be given: as it stands in `.grad`, by parameter name, or not known."""


class InfluenceTraceInstrument(WritingObserver):
    """The trace in processes that run the model themselves: the embedded loop and TRL. On several `ranks` each has the
    labels of the whole batch and the passes of some of its responses; all of them end up with the whole trace."""

    def __init__(
        self,
        policy: Policy,
        record: InfluenceRecord,
        loss: TrainingPass,
        optimizer: Any,
        coming: Callable[[], Coming] = lambda: True,
        grad_clip: float = 0.0,
        ranks: Ranks | None = None,
    ) -> None:
        """`optimizer` takes the steps, on gradients clipped to `grad_clip`; `coming` says what is known of its next
        gradient when a mini-batch is scored."""
        self.policy = policy
        self.record = record
        self.writer = record.writer
        self.config = record.config
        self.coming = coming
        self.ranks = ranks or Ranks()
        self.tracer = InfluenceTracer(
            policy.model, self.config, self.ranks.group, defer_errors=True, optimizer=optimizer
        )
        self.tracer.close()  # hooks are on the model during updates only: the sampler's fast path wants it bare
        self.capture = InfluenceCapture(self.tracer, loss)
        self.check: TrainingCheck | None = None
        if self.config.verify_every:
            self.check = TrainingCheck(policy.model, optimizer, policy.temperature, grad_clip)
        self._step: StepState | None = None

    def close(self) -> None:
        self.tracer.close()
        super().close()

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
        state.backward = backward
        if self.config.scope_pass:
            return nullcontext()
        if state.update is not backward.update:
            self.capture.begin(backward.update.rows, backward.update.number)
            state.update = backward.update
        if backward.micro.shares_prompts and self.config.needs_prompts:
            return nullcontext()
        traced = self._traced(backward.micro, backward.token_weights.amax(1), backward.number)
        # Passes over sharded weights are made by all ranks.
        if not self.capture.holds(traced) and not is_sharded(self.policy.model):
            return nullcontext()
        roles = self.capture.roles(backward.number)
        with self._guarded():
            self._own_passes(traced, roles, backward.micro)
        if roles.riding is None or state.failure is not None:
            return nullcontext()
        return self.capture.around(traced, roles.riding, rides=True)

    def _scope_pass(self, state: StepState) -> None:
        """Capture the whole batch at the weights as they are."""
        if state.backward is None or state.backward.passes is None:
            raise AttributionError("scope_pass=true: this host cannot run the whole batch at the first weights")
        state.had_scope_pass = True
        batch = state.batch
        rows = torch.arange(len(batch)) if batch.kept is None else batch.kept.nonzero().squeeze(-1)
        if self.capture.begin(rows, 0):
            self._passes_apart(state.backward, 0)

    def _passes_apart(self, backward: Backward, optimizer_step: int) -> None:
        """Capture the current mini-batch in passes whose gradients go nowhere, every response with its own prompt."""
        assert self.capture.current is not None and backward.passes is not None
        roles = self.capture.roles(optimizer_step)
        for micro, run in backward.passes(self.capture.current.rows):
            traced = self._traced(micro, torch.ones(len(micro.rows)), optimizer_step)
            self._own_passes(traced, roles, micro)
            if roles.riding is not None:
                with self.capture.around(traced, roles.riding, rides=True), self.policy.own_pass() as ends:
                    self._differentiate(run()[0][micro.mask.to(self.policy.device)].sum(), ends)

    def _after_shared_prompts(self, backward: Backward) -> None:
        """What passes with shared prompts could not give of the mini-batch that is about to be scored."""
        assert self.capture.current is not None and backward.passes is not None
        if self.config.needs_prompts:
            if len(self.capture.current.rows):
                self._passes_apart(backward, backward.number)
        elif self.config.wants_loss_term:
            self._direct(backward.passes(self.capture.directed_rows(), apart=False))

    def _direct(self, passes: Passes) -> None:
        """Capture the directions of loss terms: a contrast asks of a prompt no more than the sum over its responses."""
        weights = self.capture.direction_weights()
        for micro, run in passes:
            assert micro.prompt_rows is not None
            seen = self.policy.seen_by_head(micro)
            around = self.capture.around_directions(micro.prompt_rows, micro.logit_positions, seen)
            with around, self.policy.own_pass() as ends:
                log_probs = run()[1]
                own = (weights[micro.rows, None] * micro.mask).to(log_probs)
                self._differentiate((log_probs * own).sum(), ends)

    def _traced(self, micro: MicroBatch, token_weight: Tensor, optimizer_step: int) -> TracedPass:
        return TracedPass(
            rows=micro.rows,
            response=micro.response,
            tokens=micro.tokens,
            token_weight=token_weight,
            optimizer_step=optimizer_step,
            positions=self.policy.seen_by_head(micro),
            predicted_at=micro.logit_positions if micro.shares_prompts else None,
        )

    def _own_passes(self, traced: TracedPass, roles: PassRoles, micro: MicroBatch) -> None:
        """The passes of objectives other than the training loss."""
        for role in roles.own:
            with self.capture.around(traced, role, rides=False), self.policy.own_pass() as ends:
                self._differentiate(self._weighted_log_probs(role, micro)[0].sum(), ends)

    def _differentiate(self, value: Tensor, ends: Sequence[Tensor] = ()) -> None:
        """Gradients go nowhere: autograd.grad, and the result is dropped; the hooks have seen them. `ends`: where the
        pass ends, if not at the weights."""
        weights: Any = [block.sites[0].module.weight for block in self.tracer.blocks]
        torch.autograd.grad(value, ends or weights, allow_unused=True)

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
        if state is not None:
            self._agree(state)
        if state is not None and state.failure is None:
            terms = self._terms if self.config.wants_loss_term else None
            with self._guarded():
                if self.config.scope_pass and not state.had_scope_pass:
                    self._scope_pass(state)
                    self.capture.score(terms=terms, coming=self.coming())
                elif state.update is update:
                    if state.backward is not None and state.backward.micro.shares_prompts:
                        self._after_shared_prompts(state.backward)
                    self.capture.score(terms=terms, coming=self.coming())
        if self.check is not None and state is not None and state.failure is None:
            self._verify(self.check, state, update)
        yield

    def _agree(self, state: StepState) -> None:
        """One rank alone cannot score, since the others would wait for it: the failure of one is one of all."""
        for reason in self.ranks.gather(state.failure and str(state.failure)):
            if reason is not None and state.failure is None:
                state.failure = AttributionError(reason)

    def _verify(self, check: TrainingCheck, state: StepState, update: OptimizerStep) -> None:
        """Hold the first scores of a step against real optimizer steps, every `verify_every` steps."""
        plan = self.capture.plan
        if state.validity is not None or state.step % self.config.verify_every or not self.capture.scored:
            return
        assert plan is not None
        state.validity = {}
        self.tracer.close()
        try:
            if self.coming() is None:
                raise AttributionError(
                    "its passes belong to several optimizer steps, so its scores to different weights. Run "
                    "`gradtrace verify` on a checkpoint, or gradtrace.verify() between two rollouts"
                )
            tokens = int(state.batch.written_counts[update.rows].sum())
            raised = lambda places: self._terms(places)[0]  # noqa: E731
            state.validity = check.run(state.batch, plan, self.capture.scored[-1], raised, tokens)
        except Exception as error:
            if self.config.on_error == "raise":
                raise
            self.record.tell_once("verify_every", f"step {state.step} is not verified: {error}")
        finally:
            self.tracer.attach()

    def _terms(self, responses: list[int]) -> Tensor:
        """[2, N]: every token's own term of the step, to be raised, and its log-prob."""
        assert self._step is not None and self._step.backward is not None
        assert self.capture.current is not None
        # Ranks that keep the others company, where weights are sharded, run any response.
        rows = self.capture.current.rows[responses or [0]]
        if self.config.output_function != "training_loss":
            micro = Sequences.of(self._step.batch).micro_batch(rows, self.policy.best_layout())
            return self._weighted_log_probs("step", micro)
        losses, log_probs = self._step.backward.token_terms(rows)
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
        self._agree(state)
        capture = self.capture
        if state.failure is None:
            capture.drop_unscored()
            scored = [joined_over(self.ranks, part) for part in capture.scored]
            try:
                return self.record.write(batch, scored, capture.status, step) | (state.validity or {})
            except Exception as error:
                if self.config.on_error == "raise":
                    raise
                state.failure = error
        return self.record.failed(state.failure, capture.status, step)
