"""The validation set of TracIn selection: which prompts, when they are sampled anew, and its objective.

Everything follows from the seed and the step, so that a resumed run draws what the straight run would have drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradtrace.algorithms import AdvantageInputs, AdvantageOutputs, Algorithm, advantage
from gradtrace.algorithms.groups import constant_groups
from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.instruments.contract import Samples, TrainingRun
from gradtrace.instruments.tracin import POOL_BATCHES, TracinConfig
from gradtrace.policy.rollouts import add_advantages, keep_groups
from gradtrace.tasks.base import Prompt

SEED_STRIDE = 7_368_787


@dataclass(frozen=True, eq=False)
class ValidationSet:
    batch: RolloutBatch
    """Its responses, with true rewards and advantages."""
    pool_index: Tensor
    """long[G]: its prompts in the pool."""
    step: int
    """The training step that sampled it."""


@dataclass(eq=False)
class ValidationSource:
    settings: TracinConfig
    pool: Sequence[Prompt]
    """The prompts to draw from."""
    estimator: Algorithm[AdvantageInputs, AdvantageOutputs]
    seed: int
    current: ValidationSet | None = field(default=None, init=False)
    _drawn: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long), init=False)
    """The prompts of the pool that are being sampled."""

    @staticmethod
    def of(settings: TracinConfig, run: TrainingRun) -> ValidationSource:
        """Prompts that are never trained on: the user's files, or validation prompts that the run does not report on,
        so that reported accuracy stays held out from selection too."""
        key, wanted = run.setting("tracin"), settings.val_batch_size
        pool = run.held_out(POOL_BATCHES * wanted, f"{key}.val_files", list(settings.val_files), unreported=True)
        if not pool:
            raise GradtraceError(
                f"{key}.enable=true needs validation prompts, and none are left beside those that "
                "trainer.validation reports on. Raise data.validation_fraction, lower trainer.validation.prompts, or "
                f"name files of your own: {key}.val_files=[FILE]."
            )
        if len(pool) < wanted:
            run.report(
                f"tracin: only {len(pool)} validation prompts, fewer than {key}.val_batch_size={wanted}: all of them "
                "are used every time."
            )
        # A critic's estimator, say, needs more than rewards.
        estimator = advantage("grpo") if run.estimator.needs else run.estimator
        return ValidationSource(settings, pool, estimator, run.seed)

    def samples(self, step: int) -> Samples | None:
        """What to sample for this step; None: the set of an earlier step is still in use."""
        settings = self.settings
        if self.current is not None and self.current.step >= step - (step - 1) % settings.val_refresh_every:
            return None
        generator = torch.Generator().manual_seed(SEED_STRIDE * (self.seed + 1) + step)
        factor = 1 if settings.val_strategy == "random" else settings.val_candidates
        self._drawn = torch.randperm(len(self.pool), generator=generator)[: factor * settings.val_batch_size]
        prompts = [self.pool[index] for index in self._drawn.tolist()]
        return Samples(prompts, settings.val_n, generator, judged=True)

    def take(self, batch: RolloutBatch, step: int) -> None:
        """What `val_strategy` chooses of judged responses to `samples`, one group for each prompt, becomes the set of
        this step and of those until the next refresh."""
        settings, drawn = self.settings, self._drawn
        if len(batch.prompts) != len(drawn):  # some had no response
            drawn = torch.full((len(batch.prompts),), -1)
        if settings.val_level == "response":
            batch, groups = extreme_responses(batch, settings.val_strategy, settings.val_candidates)
        else:
            groups = choose_groups(batch, settings.val_strategy, settings.val_batch_size)
            batch = add_advantages(keep_groups(batch, groups), self.estimator)
        self.current = ValidationSet(batch, drawn[groups], step)

    # ------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Tensor]:
        """The set, for later steps of the same refresh interval; nothing where every step samples anew."""
        if self.settings.val_refresh_every == 1 or self.current is None:
            return {}
        about = {"step": torch.tensor(self.current.step), "pool_index": self.current.pool_index}
        return about | self.current.batch.only("rewards", "advantages").columns()

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        if not tensors:
            return
        columns: dict[str, Any] = dict(tensors)
        step, pool_index = int(columns.pop("step")), columns.pop("pool_index")
        if len(pool_index) and int(pool_index.max()) >= len(self.pool):
            raise GradtraceError(
                "The checkpoint's TracIn validation set names prompts that are not there any more: were "
                "trainer.tracin.val_files or the validation data changed?"
            )
        prompts = [self.pool[index] for index in pool_index.tolist()]
        items = [prompt.item for prompt in prompts]
        batch = RolloutBatch(prompts=[prompt.ids for prompt in prompts], items=items, **columns)
        self.current = ValidationSet(batch, pool_index, step)


def choose_groups(batch: RolloutBatch, strategy: str, count: int) -> Tensor:
    """long[≤ count], ascending: the groups that make the validation set.

    Groups whose rewards differ come first: those with one constant reward have no gradient. Among them
    `lowest_reward` and `highest_reward` go by the group's mean reward, `balanced` takes the groups nearest to the
    middle of all rewards seen, where good and bad responses are equally many; `random` takes them as they come.
    """
    rewards, groups = batch.need("rewards"), len(batch.prompts)
    if strategy == "random":
        return torch.arange(min(count, groups))
    means = torch.zeros(groups).index_add(0, batch.group, rewards) / torch.bincount(batch.group)
    middle = (rewards.min() + rewards.max()) / 2
    key = {"lowest_reward": means, "highest_reward": -means, "balanced": (means - middle).abs()}[strategy]
    constant = torch.zeros(groups, dtype=torch.bool)
    constant[batch.group[constant_groups(rewards, batch.group)]] = True
    order = torch.argsort(key, stable=True)
    order = torch.cat([order[~constant[order]], order[constant[order]]])
    return order[:count].sort().values


def extreme_responses(batch: RolloutBatch, strategy: str, one_in: int) -> tuple[RolloutBatch, Tensor]:
    """One in so many of the responses, by reward, and the groups they are of (long, ascending). `balanced` takes as
    many of the highest as of the lowest. Advantages are against all of `batch`, in units of its spread: among the
    lowest alone there is no contrast, and that they are low is the point."""
    rewards = batch.need("rewards")
    advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)
    count = max(1, len(batch) // one_in)
    order = torch.argsort(rewards, stable=True)
    low = {"lowest_reward": count, "highest_reward": 0, "balanced": count // 2}[strategy]
    rows = torch.cat([order[:low], order[len(order) - (count - low) :]]).sort().values
    batch = batch.replace(advantages=torch.where(batch.response_mask, advantages[:, None], 0.0))
    groups = batch.group[rows].unique()
    chosen = torch.zeros(len(batch), dtype=torch.bool)
    chosen[rows] = True
    return keep_groups(batch.select(chosen), groups), groups


def without_prompts(batch: RolloutBatch, prompts: list[list[int]]) -> tuple[RolloutBatch, int]:
    """The set without the groups whose prompt is in `prompts`, and how many those were: a response must not be
    scored against its own prompt."""
    trained = {tuple(prompt) for prompt in prompts}
    overlapping = torch.tensor([tuple(prompt) in trained for prompt in batch.prompts])
    if not bool(overlapping.any()):
        return batch, 0
    return keep_groups(batch, (~overlapping).nonzero().squeeze(-1)), int(overlapping.sum())
