"""A run whose responses are continued anew: its checkpoint, task and reward, and where results are kept.

`gradtrace counterfactual` and the viewer's "resample from here" both work through it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gradtrace.commands.rollouts.attribution import SOURCES, rollout_steps
from gradtrace.errors import GradtraceError
from gradtrace.instruments.counterfactual import COUNTERFACTUAL
from gradtrace.instruments.counterfactual.columns import (
    RESPONSE_COLUMNS,
    TOKEN_COLUMNS,
    MeasuredGroup,
    stored_groups,
    write_groups,
)
from gradtrace.instruments.counterfactual.measure import Clues
from gradtrace.instruments.counterfactual.sampling import Continuations
from gradtrace.rollout import Sampler, SamplingParams
from gradtrace.runs import Checkpoint, NotStoredError, open_run
from gradtrace.trace.columns import INFLUENCE_SCORES
from gradtrace.trace.files import make_folder
from gradtrace.trace.run_files import acquire_lock, release_lock
from gradtrace.trace.table import StepTable
from gradtrace.trace.writer import TraceWriter


@dataclass(frozen=True, eq=False)
class SourceGroup:
    """A group as the run's traces have it."""

    index: int
    group_id: int
    prompt: list[int]
    responses: list[list[int]]
    rewards: np.ndarray
    columns: dict[str, np.ndarray]
    clues: Clues
    written: list[np.ndarray] | None
    """Of each response which tokens the policy wrote; None: all."""


class Resampler:
    """Continues responses of one run. The model is loaded when it is needed, and kept."""

    def __init__(self, path: Path, overrides: list[str] | None = None, model: Path | None = None) -> None:
        """`path`: a run, or a checkpoint of one that is to be used. `model`: a transformers folder to use instead."""
        self.run = open_run(path, overrides or [])
        self.run.check_task()
        self.run.refuse_unasked_code()
        if model is not None:
            self.run = self.run.with_model(model)
        self.run_dir = self.run.given
        self.config = self.run.settings
        self._sampler: tuple[Checkpoint, Sampler] | None = None

    # ------------------------------------------------------------ what there is

    @cached_property
    def weights(self) -> list[Checkpoint]:
        """The policies that are there."""
        chosen = self.run.chosen
        found = [chosen] if chosen else [each for each in self.run.checkpoints if each.step is not None]
        if not found:
            raise NotStoredError(
                f"{self.run_dir} has no checkpoints and no policy/ to sample from: train with "
                "trainer.checkpoint.every=10, or give a transformers folder with --model"
            )
        return found

    def nearest(self, step: int) -> Checkpoint:
        """The weights nearest to those that wrote the responses of a step."""
        found = min(self.weights, key=lambda each: (abs(steps_away(each, step) or 0), each.step or 0))
        return self.run.ready(found)

    def steps(self) -> list[int]:
        return rollout_steps(self.run)

    def table(self, step: int) -> StepTable:
        """The traces with the responses of a step."""
        there = self.steps()
        if not there:
            raise GradtraceError(
                f"{self.run_dir} has no traces of its responses: train with trainer.entropy_trace.enable=true"
            )
        if step not in there:
            raise GradtraceError(f"no trace of step {step}; {self.run_dir} has {_ranges(there)}")
        return StepTable(step, {kind: self.run.step(kind, step) for kind in SOURCES if step in self.run.steps(kind)})

    def group(self, step: int, index: int | None = None) -> SourceGroup:
        """Group `index` of a step; without one, the first whose rewards differ."""
        table = self.table(step)
        rewards = table.need("reward")
        filled = np.unique(table.group).tolist()
        if index is None:
            mixed = (g for g in filled if len(np.unique(rewards[table.members(g)])) > 1)
            index = next(mixed, filled[0] if filled else 0)
        if index not in filled:
            raise GradtraceError(f"no responses of group {index}; step {step} has groups {_ranges(filled)}")
        members = table.members(index)
        tokens = table.tokens_of(members)
        own = {name: table.column(name) for name in (*RESPONSE_COLUMNS, *TOKEN_COLUMNS)}
        columns = {
            name: values[tokens if name in TOKEN_COLUMNS else members]
            for name, values in own.items()
            if values is not None
        }

        def by_response(values: np.ndarray | None) -> list[np.ndarray] | None:
            return None if values is None else np.split(values, np.cumsum(table.lengths[members])[:-1])

        return SourceGroup(
            index=index,
            group_id=int(table.need("group_id")[index]),
            prompt=table.prompt(index).tolist(),
            responses=[table.ids(r).tolist() for r in members],
            rewards=rewards[members],
            columns=columns,
            clues=Clues(by_response(columns.get("entropy")), by_response(_influence(table, tokens))),
            written=by_response(columns.get("loss_mask")),
        )

    # ------------------------------------------------------------ the model

    def load(self, weights: Checkpoint) -> Sampler:
        if self._sampler is None or self._sampler[0] != weights:
            policy = self.run.policy(weights, precision="float32")
            self._sampler = (weights, self.run.sampler(policy))
        return self._sampler[1]

    def settings(self, step: int, source: SourceGroup) -> dict[str, Any]:
        """What decides the distribution of continuations and their rewards."""
        weights, rollout, reward = self.nearest(step), self.config.rollout, self.config.reward
        return {
            "checkpoint": weights.name,
            "checkpoint_step": weights.step,
            "steps_away": steps_away(weights, step),
            "weights": weights.seal,
            "reward": reward.path or reward.name,
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            "max_new_tokens": max(rollout.max_new_tokens, *map(len, source.responses)),
            **({"max_turns": rollout.max_turns} if rollout.max_turns > 1 else {}),
        }

    def continuations(self, step: int, source: SourceGroup, seed: int = 0) -> Continuations:
        sampler, task, reward = self.load(self.nearest(step)), self.run.task, self.run.reward
        item = task.find(source.prompt)
        if item is None:
            raise GradtraceError(
                f"the prompt of group {source.index} of step {step} is not in the run's data, so that nothing can "
                "judge its continuations: are data.train and data.validation the files of the run?"
            )
        judge_by = self.config.reward
        if judge_by.name == "task" and not judge_by.path and item.get("answer", "") is None:
            raise GradtraceError(
                "the rollouts were imported without answers, so that nothing can judge their continuations: say what "
                "does, reward.name=think_format or another name (docs/rewards.md), or reward.path=my_rewards.py:mine"
            )
        if source.written is not None and sampler.environment is None:
            raise GradtraceError(
                f"step {step} has responses with what tools or users wrote, and task.name={self.config.task.name} has "
                "no tool that could answer in continuations, as task.name=calculator has. Use its influence trace, or "
                "`gradtrace verify`"
            )
        longest = self.settings(step, source)["max_new_tokens"]
        params = SamplingParams.of(self.config.rollout, task.stop_token_ids, n=1, max_new_tokens=longest)

        def judge(texts: list[str]) -> list[float]:
            return reward(texts, [item] * len(texts))

        return Continuations(sampler, task.tokenizer, params, judge, seed)

    # ------------------------------------------------------------ results

    def begin(self, step: int, source: SourceGroup, continuations: Continuations) -> MeasuredGroup:
        """A group of which nothing was measured yet."""
        begun = continuations.begin(source.prompt, source.responses, source.written)
        about = {**self.settings(step, source), "seed": continuations.seed}
        return MeasuredGroup(source.group_id, begun, about, source.columns)

    def stored(self, step: int, source: SourceGroup) -> MeasuredGroup | None:
        """What was measured of a group so far, if that was of these responses; an error if in another way."""
        settings = self.settings(step, source)
        for group in stored_groups(self.run_dir, step):
            if group.group_id != source.group_id or group.measurement.responses != source.responses:
                continue
            other = [
                f"{key}={group.about.get(key)}" for key, value in settings.items() if group.about.get(key) != value
            ]
            if other:
                raise GradtraceError(
                    f"group {source.index} of step {step} was measured in another way ({', '.join(other)}): --fresh "
                    "measures it anew, and forgets that"
                )
            return group
        return None

    @contextlib.contextmanager
    def writing(self) -> Iterator[TraceWriter]:
        """The writer of this run's results; one process at a time has it."""
        folder = self.run_dir / COUNTERFACTUAL
        make_folder(folder)
        acquire_lock(folder)
        try:
            with TraceWriter(self.run_dir, COUNTERFACTUAL, on_error="raise") as writer:
                yield writer
        finally:
            release_lock(folder)

    def save(self, writer: TraceWriter, step: int, group: MeasuredGroup) -> None:
        """Store a group beside the others of its step."""
        others = [each for each in stored_groups(self.run_dir, step) if each.group_id != group.group_id]
        group.about["samples"] = len(group.measurement.samples)
        meta = {"task": self.config.task.name, "temperature": self.config.rollout.temperature}
        write_groups(writer, step, [*others, group], meta)


def _influence(table: StepTable, tokens: np.ndarray) -> np.ndarray | None:
    """The influence scores of these tokens; None where they were not traced."""
    stored = (table.column(name) for name in INFLUENCE_SCORES)
    found = next((scores[tokens] for scores in stored if scores is not None), np.empty(0))
    return found if np.isfinite(found).any() else None


def steps_away(weights: Checkpoint, step: int) -> int | None:
    """Training steps between these weights and those that wrote the responses of `step`; None: not known."""
    return None if weights.step is None else weights.step - (step - 1)


def described(weights: Checkpoint, step: int) -> str:
    away = steps_away(weights, step)
    wrote = f"those that wrote the responses of step {step}"
    if not away:
        return weights.name if away is None else f"{weights.name}: {wrote}"
    return f"{weights.name}, {abs(away)} steps {'after' if away > 0 else 'before'} {wrote}"


def _ranges(numbers: list[int]) -> str:
    """Sorted numbers in words: 1 to 60, or 1, 3, 7."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers[:20])) + (" …" if len(numbers) > 20 else "") if numbers else "none"
