"""The validation set of TracIn selection: which prompts, when they are sampled anew, and its objective.

Everything follows from the seed and the step, so that a resumed run draws what the straight run would have drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradtrace.algorithms import AdvantageInputs, AdvantageOutputs, Algorithm, advantage
from gradtrace.algorithms.groups import constant_groups
from gradtrace.batch import RolloutBatch
from gradtrace.config import Config, TracinConfig
from gradtrace.errors import GradtraceError
from gradtrace.policy.rollouts import add_advantages, keep_groups
from gradtrace.tasks.base import Prompt, Task

POOL_BATCHES = 32
"""Validation batches without a repetition, where the task has that many prompts."""
SEED_STRIDE = 7_368_787


@dataclass(frozen=True, eq=False)
class ValidationSet:
    batch: RolloutBatch
    """Its responses, with true rewards and advantages."""
    pool_index: Tensor
    """long[G]: its prompts in the pool."""
    step: int
    """The training step that sampled it."""


def validation_pool(config: Config, task: Task, report: Callable[[str], None]) -> list[Prompt]:
    """Prompts that are never trained on: the user's files, or validation prompts that `trainer.validation` does not
    report on, so that reported accuracy stays held out from selection too."""
    settings, reported = config.trainer.tracin, config.trainer.validation
    if settings.val_files:
        return task.read_prompts(list(settings.val_files), "trainer.tracin.val_files")
    skipped = reported.prompts if reported.every else 0
    pool = task.validation_prompts(skipped + POOL_BATCHES * settings.val_batch_size)[skipped:]
    if not pool:
        raise GradtraceError(
            "trainer.tracin.enable=true needs validation prompts, and none are left: the task has no more than the "
            f"{skipped} that trainer.validation.prompts={reported.prompts} reports on. Raise data.validation_fraction, "
            "lower trainer.validation.prompts, or name files of your own: trainer.tracin.val_files=[FILE]."
        )
    if len(pool) < settings.val_batch_size:
        report(
            f"tracin: only {len(pool)} validation prompts, fewer than trainer.tracin.val_batch_size="
            f"{settings.val_batch_size}: all of them are used every time."
        )
    return pool


def validation_advantage(name: str, options: dict[str, Any]) -> Algorithm[AdvantageInputs, AdvantageOutputs]:
    """The run's estimator, where it needs rewards alone; else (a critic's, say) the group-relative one."""
    own = advantage(name, **options)
    return advantage("grpo") if own.needs else own


Sample = Callable[[list[Prompt], torch.Generator], RolloutBatch]
"""Prompts, and random numbers to sample with → judged responses to them."""


@dataclass(eq=False)
class ValidationSource:
    settings: TracinConfig
    pool: Sequence[Any]
    """The prompts to draw from."""
    estimator: Algorithm[AdvantageInputs, AdvantageOutputs]
    seed: int
    sample: Sample | None = None
    """A host that samples elsewhere has none, and overrides `at`."""
    _current: ValidationSet | None = field(default=None, init=False)

    def at(self, step: int) -> tuple[ValidationSet, int]:
        """The set of this training step, and how many responses were sampled for it now."""
        generated = 0
        if self.is_due(step):
            assert self.sample is not None
            candidates, generator = self.draw(step)
            batch = self.sample([self.pool[index] for index in candidates.tolist()], generator)
            self._current, generated = self.chosen(batch, candidates, step), len(batch)
        assert self._current is not None  # it is due before the first step
        return self._current, generated

    def is_due(self, step: int) -> bool:
        """Whether this step needs fresh rollouts."""
        every = self.settings.val_refresh_every
        return self._current is None or self._current.step < step - (step - 1) % every

    def draw(self, step: int) -> tuple[Tensor, torch.Generator]:
        """long: the prompts of the pool to sample in this step, and random numbers to sample them with."""
        settings = self.settings
        generator = torch.Generator().manual_seed(SEED_STRIDE * (self.seed + 1) + step)
        factor = 1 if settings.val_strategy == "random" else settings.val_candidates
        count = factor * settings.val_batch_size
        return torch.randperm(len(self.pool), generator=generator)[:count], generator

    def chosen(self, batch: RolloutBatch, candidates: Tensor, step: int) -> ValidationSet:
        """The set that `val_strategy` makes of judged responses to `candidates`, one group for each."""
        if self.settings.val_level == "response":
            batch, groups = extreme_responses(batch, self.settings.val_strategy, self.settings.val_candidates)
            return ValidationSet(batch, candidates[groups], step)
        groups = choose_groups(batch, self.settings.val_strategy, self.settings.val_batch_size)
        batch = add_advantages(keep_groups(batch, groups), self.estimator)
        return ValidationSet(batch, candidates[groups], step)

    # ------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Tensor]:
        """The set, for later steps of the same refresh interval; nothing where every step samples anew."""
        if self.settings.val_refresh_every == 1 or self._current is None:
            return {}
        about = {"step": torch.tensor(self._current.step), "pool_index": self._current.pool_index}
        return about | self._current.batch.only("rewards", "advantages").columns()

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
        self._current = ValidationSet(batch, pool_index, step)


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
