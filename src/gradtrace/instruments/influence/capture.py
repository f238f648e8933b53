"""Describes the passes of a mini-batch to the tracer: which rows, with which scale and sign, as which role."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradtrace.attribution import (
    InfluenceTrace,
    InfluenceTracer,
    TrainingPass,
    objective_sign,
    objective_weights,
    plan_passes,
    step_scale,
    target_scale,
)
from gradtrace.attribution.factors.capture import Role
from gradtrace.instruments.contract import Backward
from gradtrace.instruments.influence.plan import StepPlan


@dataclass(frozen=True)
class PassRoles:
    """Which backward passes give the gradients of the step and of the target."""

    own: tuple[Role, ...]
    """Passes of their own, in this order, before that of training."""
    riding: Role | None
    """What the training pass is captured as; None: it is not captured."""


@dataclass(eq=False)
class Scored:
    """The scores of one mini-batch."""

    rows: Tensor
    """long[r]: `RolloutBatch` rows, in the order of the trace's responses."""
    optimizer_step: Tensor
    """long[r]: steps taken on this rollout before each of them was captured."""
    trace: InfluenceTrace


@dataclass(eq=False)
class MiniBatch:
    """The mini-batch that is being captured. A response's place in `rows` is its id in the tracer."""

    rows: Tensor
    place: Tensor
    """long[R + 1]: row → place, −1 for rows that are not scored; the last entry answers for row −1."""
    optimizer_step: Tensor
    """long[r]"""
    is_scored: bool = False


class InfluenceCapture:
    def __init__(self, tracer: InfluenceTracer, loss: TrainingPass) -> None:
        """`loss` holds what is true of every pass; whether a pass is on policy is added for each."""
        self.tracer = tracer
        self.config = tracer.config
        self.loss = loss
        self.plan: StepPlan | None = None
        self.non_finite: set[int] = set()
        """Groups whose gradients were not finite, so that their optimizer step was not made."""
        self.scored: list[Scored] = []
        self.current: MiniBatch | None = None

    def start(self, plan: StepPlan) -> None:
        """A training step begins."""
        self.plan = plan
        self.non_finite = set()
        self.scored = []
        self.current = None
        self.tracer.reset()

    def begin(self, rows: Tensor, optimizer_step: int) -> bool:
        """A mini-batch of these rows begins. False if none of its groups is to be scored."""
        self.drop_unscored()
        plan = self._plan
        rows = rows[plan.to_score[rows]]
        place = torch.full((len(plan.group) + 1,), -1, dtype=torch.long)
        place[rows] = torch.arange(len(rows))
        self.current = MiniBatch(rows, place, torch.full((len(rows),), optimizer_step))
        if len(rows):
            self.tracer.begin()
        return len(rows) > 0

    def drop_unscored(self) -> None:
        """A mini-batch that began and was never scored had no optimizer step: its gradients were not finite."""
        if self.current is not None and not self.current.is_scored:
            self.give_up()
        self.current = None

    def give_up(self) -> None:
        """The weights did not move by this mini-batch: if it has scores, they mean nothing."""
        if self.current is None:
            return
        if self.current.is_scored:
            self.scored.pop()
        self.tracer.reset()
        self.non_finite |= set(self._plan.group[self.current.rows].tolist())
        self.current = None

    @property
    def _plan(self) -> StepPlan:
        assert self.plan is not None, "start() comes first"
        return self.plan

    @property
    def _mini_batch(self) -> MiniBatch:
        assert self.current is not None, "begin() comes first"
        return self.current

    # ------------------------------------------------------------ passes

    def roles(self, optimizer_step: int) -> PassRoles:
        """What the training pass is captured as at this point, and which passes step and target need of their own."""
        plan, rows = self._plan, self._mini_batch.rows
        training = dataclasses.replace(
            self.loss,
            on_policy=optimizer_step == 0,
            policy_gradient_at_ratio_one=self.loss.policy_gradient_at_ratio_one and not plan.corrected,
            one_advantage_per_response=bool(plan.one_advantage[rows].all()),
        )
        passes = plan_passes(self.config.output_function, self.config.about, training)
        own: list[Role] = [] if passes.target_rides else ["target"]
        step: Role = "both" if passes.target_rides else "step"
        return PassRoles(tuple(own), step) if passes.step_rides else PassRoles((*own, step), None)

    @contextmanager
    def around(self, traced: Backward, role: Role, rides: bool) -> Iterator[None]:
        """The backward pass inside is captured: that of training (`rides`), or a pass of the role's own."""
        mini_batch, plan = self._mini_batch, self._plan
        ids = mini_batch.place[traced.rows]
        chosen = ids >= 0
        ids, rows = ids[chosen], traced.rows[chosen]
        weight = traced.weights[chosen].float().cpu() if rides else torch.ones(len(rows))
        response = mini_batch.place[traced.response]
        tokens = traced.tokens
        if response.dim() == 2:
            tokens = tokens & (response >= 0).to(tokens.device)
        mini_batch.optimizer_step[ids] = traced.number
        output_function = self.config.output_function
        step = weight
        if rides:
            step = step_scale(output_function, weight, plan.advantages[rows], plan.rewards[rows])
        target = None
        if role == "both" and self.config.about == "log_prob" and output_function != "log_prob":
            target = self._spread(ids, target_scale(weight, plan.advantages[rows], rides))
        with self.tracer.capture(
            response=response,
            tokens=tokens,
            scale=self._spread(ids, step),
            target_scale=target,
            role=role,
            positions=traced.positions,
            **self._labels(),
        ):
            yield

    def _spread(self, ids: Tensor, values: Tensor) -> Tensor:
        """float[r]: values of some of the mini-batch's responses at their places, 0 elsewhere."""
        spread = torch.zeros(len(self._mini_batch.rows))
        spread[ids] = values.float()
        return spread

    def holds(self, rows: Tensor) -> bool:
        """Whether one of these rows is to be scored."""
        return bool((self._mini_batch.place[rows] >= 0).any())

    def weights(self, role: Role, mask: Tensor, rows: Tensor, advantages: Tensor) -> Tensor:
        """[b, T]: w_t of Σ w_t ℓ_t in a pass of the role's own, for the sequences `rows`; `advantages` is [b, T]."""
        output_function = "log_prob" if role == "target" else self.config.output_function
        rewards = torch.where(rows >= 0, self._plan.rewards[rows], 0.0).to(mask.device)
        return objective_weights(output_function, mask, advantages=advantages, rewards=rewards)

    def _labels(self) -> dict[str, Any]:
        """The labels of the mini-batch's responses, as the tracer takes them."""
        plan, rows = self._plan, self._mini_batch.rows
        labels: dict[str, Any] = {
            "accepted": plan.accepted[rows],
            "group": plan.group[rows],
            "advantages": plan.advantages[rows],
        }
        if self.config.about == "output_function":
            sign = objective_sign(self.config.output_function, plan.advantages[rows], plan.rewards[rows])
            labels["sign"] = sign
        return labels

    # ------------------------------------------------------------ scores

    def score(self, **options: Any) -> None:
        """Score the mini-batch, with the `options` of `InfluenceTracer.score`: after its backward passes, before the
        weights move."""
        mini_batch = self._mini_batch
        if not len(mini_batch.rows):
            return
        moved = self.tracer.ranks.bytes_moved
        trace = self.tracer.score(**self._labels(), **options)
        trace.metrics["influence_trace/debug_bytes_moved"] = float(self.tracer.ranks.bytes_moved - moved)
        self.scored.append(Scored(mini_batch.rows, mini_batch.optimizer_step, trace))
        mini_batch.is_scored = True
