"""What the driver tells the ranks with the data of an update: each key holds one of these, where a step has it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradtrace.instruments.influence.plan import StepPlan

ROW = "gradtrace_row"
"""Field with each sample's row in the step's `RolloutBatch`; −1 for padding."""
SAMPLED = "rollout_log_probs"
"""Field with the sampler's log-probs, where verl asks for them (actor_rollout_ref.rollout.calculate_log_probs)."""
LABELS = "gradtrace_labels"
"""Key of a `StepLabels`."""
BLAME_STEP = "gradtrace_blame"
"""Key of a `BlameInputs`."""
PROBE = "gradtrace_entropy_probe"
"""Key of a `ProbeInputs`."""
MISMATCH = "gradtrace_mismatch"
"""Key of a `MismatchInputs`."""


@dataclass(frozen=True, eq=False)
class StepLabels:
    """Labels of all R responses of a step, the same on all ranks."""

    plan: StepPlan
    mini_batch: Tensor
    """long[R]: the optimizer step of an epoch that it belongs to; whole groups."""

    def rows(self, mini_batch: int) -> Tensor:
        """long[r]: the rows to score in this mini-batch, ascending; their places are the tracer's response ids."""
        return (self.plan.to_score & (self.mini_batch == mini_batch)).nonzero().squeeze(-1)

    @property
    def last_scored(self) -> int:
        """The last mini-batch that has rows to score: others pass by unseen."""
        return int(self.mini_batch[self.plan.to_score].max())

    @property
    def last_mini_batch(self) -> int:
        return int(self.mini_batch.max())


@dataclass(frozen=True, eq=False)
class BlameInputs:
    """The same on all ranks."""

    step: int
    mini_batches: int
    """Optimizer steps of the first epoch; later ones are not shared out."""
    is_due: bool
    """Whatever the gradient is like; else only if it is unusual."""
    parts_dir: str


@dataclass(frozen=True, eq=False)
class ProbeInputs:
    """E and where results go, on all ranks alike."""

    step: int
    prompts: list[list[int]]
    """The prompt of every sequence of E."""
    responses: list[list[int]]
    parts_dir: str


@dataclass(frozen=True)
class MismatchInputs:
    """A step whose mismatch is measured, and where ranks put what they find."""

    step: int
    parts_dir: str
