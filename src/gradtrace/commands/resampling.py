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
import torch

from gradtrace.commands.rollouts.attribution import SOURCES, rollout_steps
from gradtrace.commands.rollouts.importing import at_home
from gradtrace.config_loader import load_config, run_of
from gradtrace.errors import GradtraceError
from gradtrace.instruments.counterfactual.choose import Clues
from gradtrace.instruments.counterfactual.columns import (
    RESPONSE_COLUMNS,
    TOKEN_COLUMNS,
    MeasuredGroup,
    stored_groups,
    write_groups,
)
from gradtrace.instruments.counterfactual.sampling import Continuations
from gradtrace.integrations.verl.launch.checkpoints import converted, steps_of
from gradtrace.policy.policy import Policy, load_with_adapters
from gradtrace.rollout import Sampler, SamplingParams
from gradtrace.tasks.base import Task
from gradtrace.tasks.rewards import RewardFunction
from gradtrace.trace import lock
from gradtrace.trace.atomic import DamagedError, make_folder, unseal
from gradtrace.trace.reader import Run, open_run
from gradtrace.trace.schema import COUNTERFACTUAL, INFLUENCE_TRACE
from gradtrace.trace.step import Step
from gradtrace.trace.writer import TraceWriter
from gradtrace.training.checkpoint import MARKER, check_complete, weights_seal, what_exists
from gradtrace.training.parts import build_reward, build_sampler, build_task, suitable_threads


@dataclass(frozen=True)
class Weights:
    """A policy of the run, and how many training steps are behind it (None: not known)."""

    folder: Path
    name: str
    step: int | None

    def away(self, step: int) -> int | None:
        """Training steps between these weights and those that wrote the responses of `step`."""
        return None if self.step is None else self.step - (step - 1)

    def described(self, step: int) -> str:
        away = self.away(step)
        wrote = f"those that wrote the responses of step {step}"
        if not away:
            return self.name if away is None else f"{self.name}: {wrote}"
        return f"{self.name}, {abs(away)} steps {'after' if away > 0 else 'before'} {wrote}"


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model that is ready to sample, with the task and the reward that judge it."""

    weights: Weights
    sampler: Sampler
    task: Task
    reward: RewardFunction


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
        self.run_dir = run_of(path)
        self.run: Run = open_run(self.run_dir)
        if not (self.run_dir / "config.yaml").is_file():
            raise GradtraceError(f"{self.run_dir} is no run: it has no config.yaml. Give one, e.g. runs/demo.")
        self.config = at_home(load_config([f"resume={self.run_dir}", *(overrides or [])]), self.run_dir)
        self._fixed = model or (path if path != self.run_dir else None)
        self._loaded: Loaded | None = None

    # ------------------------------------------------------------ what there is

    @cached_property
    def weights(self) -> list[Weights]:
        """The policies that are there."""
        if self._fixed is not None:
            if (self._fixed / MARKER).is_file():
                check_complete(self._fixed)
                return [_checkpoint(self._fixed)]
            if not (self._fixed / "config.json").is_file():
                raise GradtraceError(
                    f"{self._fixed} is no checkpoint and no transformers folder (no config.json); "
                    f"{what_exists(self._fixed)}"
                )
            return [Weights(self._fixed, str(self._fixed), None)]
        found = [_checkpoint(file.parent) for file in sorted(self.run_dir.glob(f"checkpoints/step_*/{MARKER}"))]
        there = {each.step for each in found}
        for step in set(steps_of(self.run_dir)) - there:  # verl's own, which `nearest` converts
            name = f"step_{step:06d}"
            found.append(Weights(self.run_dir / "checkpoints" / name, name, step))
        last, policy = self.run.summary.get("steps"), self.run_dir / "policy"
        if isinstance(last, int) and (policy / "config.json").is_file():
            found.append(Weights(policy, "policy", last))
        if not found:
            raise GradtraceError(
                f"{self.run_dir} has no checkpoints and no policy/ to sample from: train with "
                "trainer.checkpoint.every=10, or give a transformers folder with --model"
            )
        return found

    def nearest(self, step: int) -> Weights:
        found = min(self.weights, key=lambda each: (abs(each.away(step) or 0), each.step or 0))
        if found.step is not None and not found.folder.is_dir():
            converted(self.run_dir, found.step)
        return found

    def steps(self) -> list[int]:
        return rollout_steps(self.run)

    def source(self, step: int) -> Step:
        """The trace with the responses of a step."""
        for kind in SOURCES:
            if step in self.run.steps(kind):
                return self.run.step(kind, step)
        there = self.steps()
        if not there:
            raise GradtraceError(
                f"{self.run_dir} has no traces of its responses: train with trainer.entropy_trace.enable=true"
            )
        raise GradtraceError(f"no trace of step {step}; {self.run_dir} has {_ranges(there)}")

    def group(self, step: int, index: int | None = None) -> SourceGroup:
        """Group `index` of a step; without one, the first whose rewards differ."""
        source = self.source(step)
        filled = np.unique(source["group"]).tolist()
        if index is None:
            rewards = {g: source["reward"][source["group"] == g] for g in filled}
            index = next((g for g in filled if len(set(rewards[g].tolist())) > 1), filled[0] if filled else 0)
        if index not in filled:
            raise GradtraceError(f"no responses of group {index}; step {step} has groups {_ranges(filled)}")
        group = source.group(index)
        tokens = [source.tokens(r) for r in group.responses]
        columns = {name: source[name][group.responses] for name in RESPONSE_COLUMNS if name in source}
        for name in TOKEN_COLUMNS:
            if name in source:
                columns[name] = np.concatenate([own[name] for own in tokens])
        return SourceGroup(
            index=index,
            group_id=group.group_id,
            prompt=group.prompt_ids.tolist(),
            responses=[own["token_id"].tolist() for own in tokens],
            rewards=source["reward"][group.responses],
            columns=columns,
            clues=Clues(
                [own["entropy"] for own in tokens] if "entropy" in source else None,
                self._influence(step, columns["row"]),
            ),
            written=[own["loss_mask"] for own in tokens] if "loss_mask" in source else None,
        )

    def _influence(self, step: int, rows: np.ndarray) -> list[np.ndarray] | None:
        """Influence scores of the responses in these rows of the batch, where they were traced."""
        if step not in self.run.steps(INFLUENCE_TRACE):
            return None
        trace = self.run.step(INFLUENCE_TRACE, step)
        place = {int(row): r for r, row in enumerate(trace["row"])}
        found = [trace.influence(place[int(row)]) for row in rows if int(row) in place]
        return found if len(found) == len(rows) and all(own is not None for own in found) else None  # type: ignore[return-value]

    # ------------------------------------------------------------ the model

    def load(self, weights: Weights) -> Loaded:
        if self._loaded is not None and self._loaded.weights == weights:
            return self._loaded
        if (weights.folder / MARKER).is_file():
            check_complete(weights.folder)
        folder = weights.folder / "policy" if (weights.folder / "policy").is_dir() else weights.folder
        self.config.model.path = str(folder)
        reward = build_reward(self.config.reward)
        _, task = build_task(self.config, None)
        model = load_with_adapters(folder, self.config.model, trainable=False, key="checkpoint").eval()
        device = next(model.parameters()).device
        if device.type == "cpu":
            policy = Policy(model, device, self.config.rollout.temperature)
            torch.set_num_threads(self.config.trainer.cpu_threads or suitable_threads(policy))
        sampler = build_sampler(model, task, self.config.rollout)
        self._loaded = Loaded(weights, sampler, task, reward or RewardFunction(f"{task.name}.reward", task.reward))
        return self._loaded

    def settings(self, step: int, source: SourceGroup) -> dict[str, Any]:
        """What decides the distribution of continuations and their rewards."""
        weights, rollout, reward = self.nearest(step), self.config.rollout, self.config.reward
        return {
            "checkpoint": weights.name,
            "checkpoint_step": weights.step,
            "steps_away": weights.away(step),
            "weights": weights_seal(weights.folder),
            "reward": reward.path or reward.name,
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            "max_new_tokens": max(rollout.max_new_tokens, *map(len, source.responses)),
            **({"max_turns": rollout.max_turns} if rollout.max_turns > 1 else {}),
        }

    def continuations(self, step: int, source: SourceGroup, seed: int = 0) -> Continuations:
        loaded = self.load(self.nearest(step))
        item = loaded.task.find(source.prompt)
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
        if source.written is not None and loaded.sampler.environment is None:
            raise GradtraceError(
                f"step {step} has responses with what tools or users wrote, and task.name={self.config.task.name} has "
                "no tool that could answer in continuations, as task.name=calculator has. Use its influence trace, or "
                "`gradtrace verify`"
            )
        longest = self.settings(step, source)["max_new_tokens"]
        params = SamplingParams.of(self.config.rollout, loaded.task.stop_token_ids, n=1, max_new_tokens=longest)

        def judge(texts: list[str]) -> list[float]:
            return loaded.reward(texts, [item] * len(texts))

        return Continuations(loaded.sampler, loaded.task.tokenizer, params, judge, seed)

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
        lock.acquire(folder)
        try:
            with TraceWriter(self.run_dir, COUNTERFACTUAL, on_error="raise") as writer:
                yield writer
        finally:
            lock.release(folder)

    def save(self, writer: TraceWriter, step: int, group: MeasuredGroup) -> None:
        """Store a group beside the others of its step."""
        others = [each for each in stored_groups(self.run_dir, step) if each.group_id != group.group_id]
        group.about["samples"] = len(group.measurement.samples)
        meta = {"task": self.config.task.name, "temperature": self.config.rollout.temperature}
        write_groups(writer, step, [*others, group], meta)


def _checkpoint(folder: Path) -> Weights:
    try:
        step = int(unseal((folder / "state.json").read_bytes())["step"])
    except (OSError, DamagedError, KeyError, ValueError) as error:
        raise GradtraceError(f"{folder} is damaged: state.json: {error}") from error
    return Weights(folder, folder.name, step)


def _ranges(numbers: list[int]) -> str:
    """Sorted numbers in words: 1 to 60, or 1, 3, 7."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers[:20])) + (" …" if len(numbers) > 20 else "") if numbers else "none"
