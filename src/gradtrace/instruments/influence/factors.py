"""The influence trace beside the weights, for scores from captured factors: captures the passes of training, and scores
before the weights move.

Scores are taken in the first epoch over a rollout, mini-batch by mini-batch, before the optimizer step of that
mini-batch. A group lies within one mini-batch, so its scores are all of one θ; `optimizer_step` of each row says how
many steps on this rollout had been taken before (0: the weights that sampled it). With `all_selected` the scope is
the selected responses of one mini-batch. With `scope_pass` the whole batch is scored at the first θ, in extra passes
before the first optimizer step, and `all_selected` is the whole step.

Where responses share their prompt in training, no gradient is of one response, and the mini-batch is captured in extra
passes before the optimizer step, in which every response has its prompt to itself.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradtrace.attribution import InfluenceTracer
from gradtrace.attribution.collectives import is_sharded
from gradtrace.attribution.factors.capture import Role
from gradtrace.attribution.factors.loss_terms import SharedTerms, Terms
from gradtrace.errors import GradtraceError
from gradtrace.instruments.contract import Backward, Host, Observer, OptimizerStep, Pass, Rows, StepSize, Table
from gradtrace.instruments.influence import InfluenceTraceConfig
from gradtrace.instruments.influence.capture import InfluenceCapture
from gradtrace.instruments.influence.factor_columns import scores_table
from gradtrace.instruments.influence.observer import available_memory
from gradtrace.instruments.influence.plan import StepPlan


class FactorsObserver(Observer):
    def __init__(self, host: Host, settings: InfluenceTraceConfig) -> None:
        self.host = host
        self.config = settings
        group = host.ranks.group
        self.tracer = InfluenceTracer(
            host.model, config=settings, process_group=group, defer_errors=True, optimizer=host.optimizer
        )
        self.tracer.close()  # hooks are on the model during updates only: the sampler's fast path wants it bare
        self.capture = InfluenceCapture(self.tracer, host.loss_traits)
        self._mini_batch = -1
        """The mini-batch that is being captured."""
        self._shares_prompts = False
        """Its passes of training shared their prompts."""
        self._had_scope_pass = False
        if host.step_size is not None:
            self._check_memory(host.step_size)

    def _check_memory(self, step: StepSize) -> None:
        """Say what the trace may need at most, and refuse what cannot fit before anything is allocated."""
        prompts = min(self.config.max_prompts_per_step or step.prompts, step.prompts)
        responses = prompts * step.responses
        needed, layers = self.tracer.memory_estimate(responses, responses * step.tokens).total, len(self.tracer.blocks)
        device = next(self.host.model.parameters()).device
        free = available_memory(device)
        size = f"{needed / 2**20:,.0f} MB for {responses} responses of up to {step.tokens} tokens"
        if needed > free:
            raise GradtraceError(
                f"trainer.influence_trace needs up to {size} in {layers} layers, and {free / 2**20:,.0f} MB are free: "
                "raise projection_dim_factor, set max_hessian_dim, max_modules or max_prompts_per_step, or leave "
                "solver=auto."
            )
        self.host.report(f"influence trace: {layers} layers, at most {size}.")

    def begin(self, plan: StepPlan) -> None:
        super().begin(plan)
        self._mini_batch, self._had_scope_pass = -1, False
        self.tracer.attach()
        self.capture.start(plan)

    # ------------------------------------------------------------ the passes of training

    def before_passes(self, update: OptimizerStep, rows: Rows) -> None:
        if self.config.scope_pass:
            return
        if self._mini_batch != update.mini_batch:
            self._mini_batch, self._shares_prompts = update.mini_batch, False
            self.capture.begin(update.rows, update.number)
        for role in self.capture.roles(update.number).own if self._somebody_has(self._scored(rows)) else ():
            self._listen(rows, role, update.number)

    def around_backward(self, backward: Backward) -> AbstractContextManager[Any]:
        if self.config.scope_pass or self.capture.current is None or not len(self.capture.current.rows):
            return nullcontext()
        if backward.prompt_rows is not None:
            self._shares_prompts = True
            return nullcontext()
        # Passes over sharded weights are made by all ranks.
        if not self.capture.holds(backward.rows) and not is_sharded(self.host.model):
            return nullcontext()
        riding = self.capture.roles(backward.number).riding
        if riding is None:
            return nullcontext()
        return self.capture.around(backward, riding, rides=True)

    def _scored(self, rows: Rows) -> Rows:
        """Those of these rows that are scored in the current mini-batch."""
        assert self.capture.current is not None
        return rows.pick(rows.ids[torch.isin(rows.ids, self.capture.current.rows)])

    def _somebody_has(self, rows: Rows) -> bool:
        """A process has one of these rows: then all of them make the passes."""
        return max(self.host.ranks.gather(len(rows.ids))) > 0

    def _listen(self, rows: Rows, role: Role, number: int) -> None:
        """Extra backward passes of an objective other than the training loss, every response with its own prompt."""

        def around(backward: Backward) -> AbstractContextManager[Any]:
            return self.capture.around(dataclasses.replace(backward, number=number), role, rides=False)

        self.host.listen(rows, partial(self._objective, role), around)

    def _objective(self, role: Role, one: Pass) -> Tensor:
        """[b, T]: every token's own term of a log-prob objective."""
        advantages = one.column("advantages")
        assert advantages is not None
        weights = self.capture.weights(role, one.mask, one.rows, advantages)
        return weights.to(one.log_probs) * one.log_probs

    # ------------------------------------------------------------ the optimizer step

    def before_step(self, update: OptimizerStep) -> None:
        if self.config.scope_pass:
            if not self._had_scope_pass:
                self._scope_pass(update)
                self._score(update)
        elif self._mini_batch == update.mini_batch and self.capture.current is not None:
            if self._shares_prompts and len(self.capture.current.rows):
                self._passes_apart(update, update.number, own=False)
            self._score(update)

    def _scope_pass(self, update: OptimizerStep) -> None:
        """Capture the whole batch at the weights as they are."""
        assert self.capture.plan is not None
        self._had_scope_pass = True
        rows = self.capture.plan.trained_rows
        if self.capture.begin(rows, 0):
            self._passes_apart(dataclasses.replace(update, rows=rows), 0)

    def _passes_apart(self, update: OptimizerStep, number: int, own: bool = True) -> None:
        """Capture the current mini-batch in extra passes, every response with its own prompt."""
        rows, roles = self._scored(self.host.own(update)), self.capture.roles(number)
        for role in roles.own if own else ():
            self._listen(rows, role, number)
        if (riding := roles.riding) is not None:

            def around(backward: Backward) -> AbstractContextManager[Any]:
                plain = dataclasses.replace(backward, number=number, weights=torch.ones(len(backward.rows)))
                return self.capture.around(plain, riding, rides=True)

            self.host.listen(rows, lambda one: one.terms() * one.mask, around)

    def _score(self, update: OptimizerStep) -> None:
        if self.capture.current is None or not len(self.capture.current.rows):
            return
        if not self.config.wants_loss_term:
            self.capture.score()
            return
        coming = self.host.next_gradient()
        options: dict[str, Any] = {} if self.host.is_exact else {"method": "finite_difference"}
        with self.host.aside():
            terms = self._terms(update)
            self.capture.score(terms=terms, coming=coming.values if coming is not None else None, **options)

    def _terms(self, update: OptimizerStep) -> Terms:
        """responses → [N]: every token's own term of the step, to be raised."""
        assert self.capture.current is not None
        rows = self.capture.current.rows
        shared = self.host.shared(update, rows)

        def run(responses: list[int]) -> Tensor:
            # Idle ranks, which only join collectives where weights are sharded, run any response.
            chosen = shared.pick(rows[responses]) if responses else shared.pick(shared.ids[:1])
            return self.host.values(chosen, self._step_terms)

        return SharedTerms(run) if shared.is_shared else run

    def _step_terms(self, one: Pass) -> Tensor:
        """Return [b, T]: every token's own term of the step, to be raised."""
        return -one.terms() if self.config.output_function == "training_loss" else self._objective("step", one)

    def after_step(self, update: OptimizerStep, moved: bool) -> None:
        if not moved:
            self.capture.give_up()

    def end(self) -> Table:
        self.tracer.close()
        self.capture.drop_unscored()
        found = scores_table(self.capture.scored, self.capture.non_finite, self.host.ranks)
        found.facts |= self.table.facts
        return found

    def drop(self) -> None:
        self.tracer.reset()
        self.tracer.close()

    def close(self) -> None:
        self.tracer.close()
