"""Influence trace: which tokens of a rollout pushed towards the accepted answers, on the real training backward.

When scores are taken: in the first epoch over a rollout, mini-batch by mini-batch, before the optimizer step of
that mini-batch. A group lies within one mini-batch, so its scores are all of one θ; `optimizer_step` of each row
says how many steps on this rollout had been taken before (0: the weights that sampled it). Taking every
score at the first θ instead would cost a pass of its own; here the trace rides on the pass that training makes
anyway. With `all_selected` the scope is therefore the selected responses of one mini-batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradtrace.algorithms import accepted, constant_groups
from gradtrace.attribution import (
    InfluenceConfig,
    InfluenceTracer,
    TrainingPass,
    needs_own_backward,
    objective_sign,
    objective_weights,
    riding_scale,
)
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.columns import Truth, no_truth, response_advantages
from gradtrace.instruments.influence.columns import Scored, describe, influence_columns
from gradtrace.instruments.observer import Backward, OptimizerStep, StepObserver
from gradtrace.policy.microbatch import MicroBatch, Sequences
from gradtrace.policy.policy import Policy
from gradtrace.trace.schema import GroupStatus
from gradtrace.trace.writer import TraceWriter

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class InfluenceSettings:
    """What the instrument adds to the knobs of the tracer."""

    write_every: int = 1
    max_prompts_per_step: int = 0
    pairwise_max_mb: float = 64.0
    on_error: str = "warn"
    kl_in_loss: bool = False
    entropy_bonus: bool = False
    policy_gradient: bool = True
    """At ratio 1 the loss has the gradient −A ∇ℓ for every token, up to one factor per response."""


class InfluenceTraceInstrument(StepObserver):
    def __init__(
        self,
        policy: Policy,
        config: InfluenceConfig,
        settings: InfluenceSettings,
        writer: TraceWriter,
        meta: dict[str, Any] | None = None,
        truth: Truth = no_truth,
        report: Callable[[str], None] = logger.warning,
    ) -> None:
        self.policy = policy
        self.config = config
        self.settings = settings
        self.writer = writer
        self.meta = (meta or {}) | describe(config)
        self.truth = truth
        self.report = report
        self.tracer = InfluenceTracer(policy.model, config, defer_errors=True)
        self.tracer.close()  # hooks are on the model during updates only: the sampler's fast path wants it bare
        self.errors = 0
        self._batch: RolloutBatch | None = None

    def start(self, last_step: int) -> None:
        self.writer.truncate_after(last_step)

    def close(self) -> None:
        self.tracer.close()
        self.writer.close()

    # ------------------------------------------------------------ the step

    def before_update(self, batch: RolloutBatch, step: int) -> RolloutBatch:
        self.needs_entropies = self._active = step % self.settings.write_every == 0
        if not self._active:
            return batch
        self.tracer.attach()
        self._batch = batch
        self._scored: list[Scored] = []
        self._pending: OptimizerStep | None = None
        self._failed = False
        self._status = group_status(batch, self.settings.max_prompts_per_step)
        self._accepted = accepted(batch.rewards, batch.group)  # type: ignore[arg-type]
        self._advantages = response_advantages(batch)
        self._rewards = batch.rewards.clone()  # type: ignore[union-attr]
        spread = torch.where(batch.response_mask, batch.advantages - self._advantages[:, None], 0.0)  # type: ignore[operator]
        self._one_advantage = spread.abs().amax(1) <= 1e-6 * self._advantages.abs()
        return batch

    def around_backward(self, backward: Backward) -> AbstractContextManager[Any]:
        if not self._active or self._failed or backward.update.epoch > 0:
            return nullcontext()
        self._begin(backward.update)
        response = self._local[backward.micro.response]
        if not bool((response >= 0).any()):
            return nullcontext()
        self._token_losses = backward.token_losses
        return self._captured(backward, response)

    def _begin(self, update: OptimizerStep) -> None:
        """The first micro-batch of a mini-batch: number its selected responses."""
        if self._pending is update:
            return
        assert self._batch is not None
        self._drop_unscored(self._batch)
        self._pending = update
        self._pending_is_scored = False
        chosen = self._status[self._batch.group[update.rows]] == int(GroupStatus.SCORED)
        self._rows = update.rows[chosen]
        self._local = torch.full((len(self._batch),), -1, dtype=torch.long)
        self._local[self._rows] = torch.arange(len(self._rows))
        self._captured_at = torch.full((len(self._rows),), update.number)

    def _drop_unscored(self, batch: RolloutBatch) -> None:
        """A mini-batch whose gradients were not finite had no optimizer step, so it was never scored."""
        if self._pending is None or self._failed or self._pending_is_scored:
            return
        self.tracer.reset()
        self._status[batch.group[self._rows]] = int(GroupStatus.NON_FINITE)

    @contextmanager
    def _captured(self, backward: Backward, response: Tensor) -> Iterator[None]:
        micro = backward.micro
        captured = self._local[micro.rows]
        self._captured_at[captured[captured >= 0]] = backward.number
        own_pass = needs_own_backward(self.config.output_function, self._training_pass(backward))
        if own_pass:
            with self._guarded(), self._capture(micro, response, 1.0):
                self._own_backward(micro)
            yield
            return
        scale = torch.zeros(len(self._rows))
        local = self._local[micro.rows]
        chosen = local >= 0
        rows = micro.rows[chosen]
        scale[local[chosen]] = riding_scale(
            self.config.output_function,
            backward.token_weights[chosen, 0].cpu(),
            self._advantages[rows],
            self._rewards[rows],
        )
        with self._capture(micro, response, scale):
            yield

    def _capture(
        self, micro: MicroBatch, response: Tensor, scale: float | Tensor
    ) -> AbstractContextManager[None]:
        assert self._batch is not None
        return self.tracer.capture(
            response=response,
            tokens=micro.tokens,
            accepted=self._accepted[self._rows],
            group=self._batch.group[self._rows],
            advantages=self._advantages[self._rows],
            sign=objective_sign(
                self.config.output_function, self._advantages[self._rows], self._rewards[self._rows]
            ),
            scale=scale,
            positions=dict.fromkeys(self._head_names(), micro.logit_positions),
        )

    def _head_names(self) -> list[str]:
        """Of the output head, which the policy runs on response positions only."""
        head = self.policy.model.get_output_embeddings()
        return [name for name, module in self.policy.model.named_modules() if module is head]

    def _training_pass(self, backward: Backward) -> TrainingPass:
        return TrainingPass(
            on_policy=backward.number == 0,
            policy_gradient_at_ratio_one=self.settings.policy_gradient,
            kl_in_loss=self.settings.kl_in_loss,
            entropy_bonus=self.settings.entropy_bonus,
            one_advantage_per_response=bool(
                (self._one_advantage & (self._advantages != 0))[self._rows].all()
            ),
        )

    def _own_backward(self, micro: MicroBatch) -> None:
        """A pass of the objective's own. Gradients go nowhere: autograd.grad, and the result is dropped."""
        objective = (self._weighted(micro) * self.policy.statistics(micro)[0]).sum()
        weights = [block.sites[0].module.weight for block in self.tracer.blocks]
        torch.autograd.grad(objective, weights, allow_unused=True)  # type: ignore[arg-type]

    def _weighted(self, micro: MicroBatch) -> Tensor:
        """[N]: w_t of the log-prob objective."""
        assert self._batch is not None and self._batch.rewards is not None
        weights = objective_weights(
            self.config.output_function,
            micro.mask,
            advantages=micro.column(self._batch, "advantages", torch.device("cpu")),
            rewards=self._batch.rewards[micro.rows],
        )
        return weights[micro.mask].to(self.policy.device)

    @contextmanager
    def around_optimizer_step(self, update: OptimizerStep) -> Iterator[None]:
        if self._active and self._pending is update and not self._failed and len(self._rows):
            with self._guarded():
                terms = self._terms if self.config.wants_loss_term else None
                trace = self.tracer.score(terms=terms)
                self._scored.append(Scored(self._rows, self._captured_at, trace))
                self._pending_is_scored = True
        yield

    def _terms(self, responses: list[int]) -> Tensor:
        """Every token's own term of the captured objective."""
        rows = self._rows[responses]
        assert self._pending is not None and self._batch is not None
        if self.config.output_function == "training_loss":
            return self._token_losses(rows)
        micro = Sequences.of(self._batch).padded(rows)
        return self._weighted(micro) * self.policy.statistics(micro)[0]

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """A failing trace is shown and counted, and costs this step's trace; it does not cost the run."""
        try:
            yield
        except Exception as error:
            if self.settings.on_error == "raise":
                raise
            self._failed = True
            self.errors += 1
            self.tracer.reset()
            self.report(f"influence trace: this step is not traced: {error}")

    # ------------------------------------------------------------ the file

    def after_update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        if not self._active:
            return {}
        self._drop_unscored(batch)
        self._batch = None
        self.tracer.close()
        metrics = self._metrics()
        if not self._failed:
            with self._guarded():
                columns, meta = influence_columns(
                    batch, self._scored, self._status, self.config, self.settings.pairwise_max_mb, self.truth
                )
                self.writer.write(step, columns, self.meta | meta)
        metrics["influence_trace/debug_errors"] = float(self.errors)
        metrics["influence_trace/debug_write_errors"] = float(self.writer.stats.failed)
        return metrics

    def _metrics(self) -> dict[str, float]:
        """Of the whole step: the mini-batches' added up, groups counted over the batch."""
        metrics: dict[str, float] = {}
        for scored in self._scored:
            for name, value in scored.trace.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + value
        for name in ("debug_modules", "debug_modules_fired"):
            key = f"influence_trace/{name}"
            if key in metrics:
                metrics[key] /= len(self._scored)
        constant = int((self._status == int(GroupStatus.CONSTANT_REWARD)).sum())
        capped = int((self._status == int(GroupStatus.OVER_PROMPT_CAP)).sum())
        metrics["influence_trace/uid_total"] = float(len(self._status))
        metrics["influence_trace/uid_constant"] = float(constant)
        metrics["influence_trace/uid_mixed"] = float(len(self._status) - constant)
        metrics["influence_trace/debug_groups_over_cap"] = float(capped)
        for name in ("selected_responses", "selected_prompts", "rows_emitted"):
            metrics.setdefault(f"influence_trace/{name}", 0.0)
        return metrics


def group_status(batch: RolloutBatch, max_prompts: int) -> Tensor:
    """long[G]: which groups will be traced, and why the others will not."""
    assert batch.rewards is not None
    status = torch.full((len(batch.prompts),), int(GroupStatus.SCORED))
    status[batch.group[constant_groups(batch.rewards, batch.group)]] = int(GroupStatus.CONSTANT_REWARD)
    if max_prompts:
        mixed = (status == int(GroupStatus.SCORED)).nonzero().squeeze(-1)
        status[mixed[max_prompts:]] = int(GroupStatus.OVER_PROMPT_CAP)
    return status
