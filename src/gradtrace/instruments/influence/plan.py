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
    to_verify: RolloutBatch | None = None
    """The batch, in a step whose scores are held against real optimizer steps."""

    @staticmethod
    def of(
        batch: RolloutBatch,
        step: int,
        max_prompts: int = 0,
        threshold: float | None = None,
        verify: bool = False,
    ) -> StepPlan:
        advantages, rewards = response_advantages(batch), batch.need("rewards")
        spread = (batch.need("advantages") - advantages[:, None]).masked_fill(~batch.response_mask, 0.0).abs().amax(1)
        return StepPlan(
            step=step,
            group=batch.group,
            accepted=accepted(rewards, batch.group, threshold),
            rewards=rewards.clone(),
            advantages=advantages,
            corrected=batch.loss_weights is not None,
            one_advantage=(spread <= 1e-6 * advantages.abs()) & (advantages != 0),
            status=group_status(batch, max_prompts, threshold),
            kept=torch.ones(len(batch), dtype=torch.bool) if batch.kept is None else batch.kept,
            to_verify=batch if verify else None,
        )

    @property
    def trained_rows(self) -> Tensor:
        """long[r]: the rows that are trained on."""
        return self.kept.nonzero().squeeze(-1)

    @property
    def to_score(self) -> Tensor:
        """bool[R]: the response's group is to be scored."""
        return self.status[self.group] == int(GroupStatus.SCORED)


def group_status(batch: RolloutBatch, max_prompts: int, threshold: float | None = None) -> Tensor:
    """long[G]: which groups will be traced, and why the others will not."""
    good = accepted(batch.need("rewards"), batch.group, threshold)
    kept = torch.ones_like(good) if batch.kept is None else batch.kept
    sides = [torch.bincount(batch.group[side & kept], minlength=len(batch.prompts)) for side in (good, ~good)]
    contrast = (sides[0] > 0) & (sides[1] > 0)  # of the kept ones, after a selection
    status = torch.where(contrast, int(GroupStatus.SCORED), int(GroupStatus.CONSTANT_REWARD))
    if max_prompts:
        status[contrast.nonzero().squeeze(-1)[max_prompts:]] = int(GroupStatus.OVER_PROMPT_CAP)
    return status
