"""What the driver knows about a step and every rank needs: groups, who was accepted, and who trains when."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradtrace.algorithms import accepted
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.columns import response_advantages

LABELS = "gradtrace_labels"
"""Key of a `StepLabels` in the data of an update."""
ROW = "gradtrace_row"
"""Field with each sample's row in the step's `RolloutBatch`; −1 for padding."""


@dataclass(frozen=True, eq=False)
class StepLabels:
    """Of all R responses of a step, on all ranks alike."""

    step: int
    group: Tensor
    """long[R]"""
    accepted: Tensor
    """bool[R]"""
    rewards: Tensor
    """float[R]"""
    advantages: Tensor
    """float[R]: mean over the tokens."""
    one_advantage: Tensor
    """bool[R]: all tokens of the response have the same advantage, and it is not 0."""
    selected: Tensor
    """bool[R]: its group will be scored."""
    mini_batch: Tensor
    """long[R]: the optimizer step of an epoch that it belongs to; whole groups."""

    @staticmethod
    def of(batch: RolloutBatch, step: int, selected: Tensor, mini_batch: Tensor) -> StepLabels:
        assert batch.rewards is not None and batch.advantages is not None
        advantages = response_advantages(batch)
        spread = torch.where(batch.response_mask, batch.advantages - advantages[:, None], 0.0).abs().amax(1)
        return StepLabels(
            step=step,
            group=batch.group,
            accepted=accepted(batch.rewards, batch.group),
            rewards=batch.rewards.clone(),
            advantages=advantages,
            one_advantage=(spread <= 1e-6 * advantages.abs()) & (advantages != 0),
            selected=selected,
            mini_batch=mini_batch,
        )

    def rows(self, mini_batch: int) -> Tensor:
        """long[r]: the rows to score in this mini-batch, ascending; their places are the tracer's response ids."""
        return (self.selected & (self.mini_batch == mini_batch)).nonzero().squeeze(-1)

    @property
    def last_scored(self) -> int:
        """The last mini-batch that has rows to score: others pass by unseen."""
        return int(self.mini_batch[self.selected].max())

    @property
    def last_mini_batch(self) -> int:
        return int(self.mini_batch.max())
