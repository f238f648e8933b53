"""What a training step's influence trace is about: which groups are scored, who was accepted, and by how much."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradtrace.algorithms import accepted
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.columns import response_advantages
from gradtrace.trace.columns import GroupStatus


@dataclass(frozen=True, eq=False)
class StepPlan:
    """Labels of all R responses and G groups of a step. It is plain data, so that it can travel to other processes."""

    step: int
    group: Tensor
    """long[R]"""
    accepted: Tensor
    """bool[R]"""
    rewards: Tensor
    """float[R]"""
    advantages: Tensor
    """float[R]: the mean over each response's tokens."""
    one_advantage: Tensor
    """bool[R]: all tokens of the response have the same advantage, and it is not 0."""
    corrected: bool
    """The loss multiplies tokens by more than their advantage (`RolloutBatch.loss_weights`)."""
    status: Tensor
    """long[G]: a `GroupStatus` of every group; SCORED means that it is to be scored."""
    kept: Tensor
    """bool[R]: the response is trained on."""
    own: Tensor
    """long[…]: groups whose tokens are also scored on their own prompt."""
    measured: Tensor
    """long[…]: those of them that are measured."""
    verify: bool = False
    """The scores of this step are held against real optimizer steps."""

    @staticmethod
    def of(
        batch: RolloutBatch,
        step: int,
        status: Tensor,
        threshold: float | None = None,
        verify: bool = False,
        own: Tensor | None = None,
        measured: Tensor | None = None,
    ) -> StepPlan:
        advantages, rewards = response_advantages(batch), batch.need("rewards")
        spread = (batch.need("advantages") - advantages[:, None]).masked_fill(~batch.response_mask, 0.0).abs().amax(1)
        none = torch.empty(0, dtype=torch.long)
        return StepPlan(
            step=step,
            group=batch.group,
            accepted=accepted(rewards, batch.group, threshold),
            rewards=rewards.clone(),
            advantages=advantages,
            corrected=batch.loss_weights is not None,
            one_advantage=(spread <= 1e-6 * advantages.abs()) & (advantages != 0),
            status=status,
            kept=kept_rows(batch),
            own=none if own is None else own,
            measured=none if measured is None else measured,
            verify=verify,
        )

    @property
    def trained_rows(self) -> Tensor:
        """long[r]: the rows that are trained on."""
        return self.kept.nonzero().squeeze(-1)

    @property
    def to_score(self) -> Tensor:
        """bool[R]: the response's group is to be scored."""
        return self.status[self.group] == int(GroupStatus.SCORED)


def kept_rows(batch: RolloutBatch) -> Tensor:
    """bool[R]: the responses that are trained on."""
    return torch.ones(len(batch), dtype=torch.bool) if batch.kept is None else batch.kept


def status_by_contrast(batch: RolloutBatch, max_prompts: int, threshold: float | None = None) -> Tensor:
    """long[G]: which groups have scores of captured factors: they hold accepted and rejected responses."""
    good, kept = accepted(batch.need("rewards"), batch.group, threshold), kept_rows(batch)
    sides = [torch.bincount(batch.group[side & kept], minlength=len(batch.prompts)) for side in (good, ~good)]
    contrast = (sides[0] > 0) & (sides[1] > 0)  # of the kept ones, after a selection
    status = torch.where(contrast, int(GroupStatus.SCORED), int(GroupStatus.CONSTANT_REWARD))
    if max_prompts:
        status[contrast.nonzero().squeeze(-1)[max_prompts:]] = int(GroupStatus.OVER_PROMPT_CAP)
    return status


def status_by_advantage(batch: RolloutBatch) -> Tensor:
    """long[G]: which groups have something to train on: a kept response with an advantage."""
    trained = (batch.need("advantages") != 0).logical_and(batch.response_mask).any(1) & kept_rows(batch)
    some = torch.bincount(batch.group[trained], minlength=len(batch.prompts)) > 0
    return torch.where(some, int(GroupStatus.SCORED), int(GroupStatus.CONSTANT_REWARD))


FORWARD = 0.35
"""A forward pass without gradients, as a part of training's forward and backward pass."""
MEASURED_SHARE = 0.03
"""What measuring groups may cost, as a part of an update, with `measure=auto` …"""
SELDOM = 10
"""… but one group is measured in so many observed steps at least."""


def groups_to_measure(batch: RolloutBatch, status: Tensor, turn: int, measure: str, pairwise: bool) -> Tensor:
    """long[…]: the groups that are measured in this step. Groups take turns over the observed steps (`turn`), so that
    none is measured because of what its scores are."""
    groups = (status == int(GroupStatus.SCORED)).nonzero().squeeze(-1)
    count, every = len(groups), 1
    if measure == "auto" and count:
        cost = cost_of_group(batch, groups, pairwise)
        count, every = int(MEASURED_SHARE / cost), min(SELDOM, -int(-cost // MEASURED_SHARE))
        count = max(1, count)
    elif measure.isdigit():
        count = int(measure)
    if turn % every or not len(groups) or not count:
        return groups[:0]
    first = turn // every * count % len(groups)
    return groups.roll(-first)[:count].sort().values


def cost_of_group(batch: RolloutBatch, groups: Tensor, pairwise: bool) -> float:
    """What measuring the mean group costs, as a part of the update."""
    members = torch.isin(batch.group, groups) & kept_rows(batch)
    share = float(members.sum()) / int(kept_rows(batch).sum()) / len(groups)
    directions = float(members.sum()) / len(groups) if pairwise else 1.0
    return share * (1.0 + FORWARD * (3.0 + directions))
