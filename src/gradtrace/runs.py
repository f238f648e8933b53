"""`open_run`: a run, what was recorded of it, and what it was made of. Torch is imported when weights are asked for."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradtrace.instruments  # noqa: F401  (makes every kind of trace known)
from gradtrace.config.keys import check_fields, schema_keys
from gradtrace.config.loader import (
    check_reward,
    finished,
    in_words,
    override_keys,
    read_settings,
    refuse_code_of,
    to_yaml,
    with_overrides,
)
from gradtrace.config.root import Config
from gradtrace.errors import GradtraceError
from gradtrace.integrations.verl.launch.checkpoints import converted, steps_of
from gradtrace.policy.settings import looks_local
from gradtrace.trace.reader import RunReader, dig
from gradtrace.trace.run_files import run_of_traces
from gradtrace.training.checkpoint import (
    FOREIGN,
    MARKER,
    OPTIMIZER,
    Checkpoint,
    Checkpoints,
    check_complete,
    what_exists,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from gradtrace.policy.policy import Policy
    from gradtrace.rollout import Sampler
    from gradtrace.tasks.base import Task
    from gradtrace.tasks.rewards import RewardFunction
    from gradtrace.trace.results import ResultStore
    from gradtrace.training.state import NextStep

IMPORTED = "imported"
"""`recipe` of a run that `gradtrace trace import` wrote."""
PROMPTS = "prompts.jsonl"
"""The prompts of an imported run with their ids and answers: the data of its task."""


class NotStoredError(GradtraceError):
    """A run does not hold what was asked for. The message says what is missing, where it was looked for, and what to
    give instead."""


def open_run(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Run:
    """Open a run, a checkpoint of one, a transformers folder, or a model on the hub by its name.

    Files are read when they are asked for, and again when they have grown. `overrides`: KEY=VALUE, settings that differ
    from the run's own.
    """
    given = Path(path).expanduser()
    number = given.name.removeprefix("global_step_")
    in_run = given.absolute().parent.name == "checkpoints"
    around = given.parent.parent if given.parent.name == "checkpoints" else given.absolute().parent.parent
    if in_run and number != given.name and number.isdigit():
        return Run(around, overrides, Checkpoint(given, f"step_{int(number):06d}", int(number), "verl"))
    if not given.is_dir():
        if looks_local(str(path)):
            raise GradtraceError(
                f"{path}: there is no such folder, and so no checkpoint and no run with one: {what_exists(given)}. "
                "Give a run, a checkpoint, a folder with a model (config.json), or a hub name."
            )
        return Run(given, overrides, Checkpoint(given, str(path), None, "plain"))
    if (given / "config.json").is_file() or (given / "adapter_config.json").is_file():
        return Run(given, overrides, Checkpoint(given, str(path), None, "plain"))
    if in_run or (given / MARKER).is_file():
        return Run(around, overrides, Checkpoint.embedded(given))
    return Run(run_of_traces(given), overrides)


class Run(RunReader):
    """A run on disk: what `RunReader` reads of it, its settings, its weights, its task and its reward."""

    def __init__(self, given: Path, overrides: Sequence[str] = (), chosen: Checkpoint | None = None) -> None:
        """`chosen`: the checkpoint or the model that the path named."""
        super().__init__(given.resolve())
        self.given = given
        """The run's folder as it was written, for messages."""
        self.overrides = list(overrides)
        self.chosen = chosen
        self._checked: set[Path] = set()

    def __repr__(self) -> str:
        return f"Run({str(self.given)!r}; a model)" if self.is_model else super().__repr__()

    @property
    def is_model(self) -> bool:
        """Weights without a run around them."""
        return self.chosen is not None and self.chosen.made_by == "plain" and self.chosen.folder == self.given

    def place_of(self, name: str) -> Path:
        if self.is_model and not self.path.is_dir():
            raise NotStoredError(
                f"no run at {self.given}: there is no such folder, so it names a model on the hub, which has no traces"
            )
        return super().place_of(name)

    def metrics(self, start: int = 0) -> tuple[list[dict[str, Any]], int]:
        self.place_of("metrics.jsonl")
        return super().metrics(start)

    def with_model(self, model: str | os.PathLike[str]) -> Run:
        """This run with the weights of another: a transformers folder, a checkpoint or a run."""
        found = open_run(model).checkpoint()
        weights = Checkpoint(found.weights, found.name, found.step, "plain")
        return Run(self.given, [f"model.path={found.weights}", *self.overrides], weights)

    # ------------------------------------------------------------ settings

    @cached_property
    def settings(self) -> Config:
        """The run's settings with `overrides`; the defaults for a run that has none, as one of `gradtrace.record`.

        Code that they name is not executed before `reward` asks for it.
        """
        if self.is_model:
            return read_settings([*self.overrides, f"model.path={self.given}"])
        if not (self.path / "config.yaml").is_file() or self.config.get("engine") == "trl":
            return self._foreign_settings()
        settings = read_settings([f"resume={self.given}", *self.overrides])
        if settings.recipe == IMPORTED and (self.path / PROMPTS).is_file():  # wherever the run was moved
            data = dataclasses.replace(settings.data, train=[str(self.given.absolute() / PROMPTS)])
            settings = dataclasses.replace(settings, data=data)
        return settings

    def _foreign_settings(self) -> Config:
        """Our defaults, with what TRL's config.yaml has under our names; a loss has other names there."""
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        known = set(schema_keys(Config)) - {"engine", "algorithm.policy_loss"}
        defaults: Any = OmegaConf.structured(Config)
        for section in ("model", "data", "rollout", "algorithm", "actor", "trainer"):
            for key, value in flat(self.config.get(section, {}), section).items():
                if key in known:
                    try:
                        OmegaConf.update(defaults, key, value)
                    except OmegaConfBaseException as error:
                        raise in_words(error, f"{self.given}/config.yaml, {key}") from None
        settings = finished(with_overrides(defaults, self.overrides), defaults, override_keys(self.overrides))
        check_fields(settings)
        check_reward(settings)
        return settings

    def refuse_unasked_code(self) -> None:
        if self.settings.resume:
            refuse_code_of(str(self.given), self.settings, override_keys(self.overrides))

    # ------------------------------------------------------------ weights

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The weights that are stored, by their steps; RUN/policy is the last."""
        if self.is_model:
            return [self.chosen] if self.chosen else []
        folder = self.given / "checkpoints"
        found = {
            step: Checkpoint(folder / f"global_step_{step}", f"step_{step:06d}", step, "verl")
            for step in steps_of(self.given)
        }
        for marker in folder.glob(f"step_*/{MARKER}"):
            each = Checkpoint.embedded(marker.parent)
            found[each.step or 0] = each
        last = self.summary.get("steps")
        final = [Checkpoint(self.given / "policy", "policy", last if isinstance(last, int) else None, "final")]
        return [found[step] for step in sorted(found)] + (final if final[0].folder.is_dir() else [])

    def checkpoint(self, step: int | None = None, *, resumable: bool = False) -> Checkpoint:
        """The checkpoint that was opened, that of a step, or else the newest weights; checked, verl's converted.

        `resumable`: only those that training can go on from; RUN/policy has no optimizer state. Step 0: the model that
        the run started from.
        """
        if step is not None:
            return self.ready(self._of_step(step))
        if self.chosen is not None:
            return self.ready(self.chosen)
        there = self.checkpoints
        if there and there[-1].made_by == "final" and not resumable:
            return there[-1]
        if by_verl := steps_of(self.given):
            return self.ready(self._of_step(by_verl[-1]))
        latest = Checkpoints(self.given).latest()
        if latest is None:
            raise self._no_weights(resumable)
        self._checked.add(latest)
        return Checkpoint.embedded(latest)

    def _of_step(self, step: int) -> Checkpoint:
        found = [each for each in self.checkpoints if each.step == step]
        start = str(dig(self.config, "model.path") or "")
        if not found and step == 0 and start and self.config.get("recipe") != IMPORTED:
            return Checkpoint(Path(start), start, 0, "plain")
        if not found:
            raise NotStoredError(
                f"{self.given} has no weights of step {step}: {what_exists(self.given)}. Give another step, or train "
                "with trainer.checkpoint.every=1"
            )
        return found[0]

    def ready(self, found: Checkpoint) -> Checkpoint:
        """A checkpoint as commands take it: verl's is converted, and every file is what was written."""
        if found.made_by == "verl":
            if found.step not in (steps := steps_of(self.given)):
                raise NotStoredError(f"{self.given} has no complete checkpoint of step {found.step}; it has {steps}")
            found = Checkpoint.embedded(converted(self.given, found.step))
        if found.made_by == "embedded" and found.folder not in self._checked:
            check_complete(found.folder)
            self._checked.add(found.folder)
        return found

    def _no_weights(self, resumable: bool) -> NotStoredError:
        of_others = not self.config or self.config.get("recipe") == IMPORTED or self.config.get("engine") == "trl"
        if of_others and self.kinds():
            return NotStoredError(
                f"{self.given} has no weights: it was recorded or imported, and has no checkpoints/ and no policy/. "
                "Give a transformers folder or a checkpoint, with --model where a command has it"
            )
        if resumable:
            return NotStoredError(f"{self.given} is no checkpoint and no run with one: {what_exists(self.given)}.")
        return NotStoredError(
            f"{self.given} is no model: it has no config.json, and no policy/ or checkpoints/ as a run has."
        )

    def policy(
        self, step: int | Checkpoint | None = None, *, trainable: bool = False, precision: str = "auto"
    ) -> Policy:
        """The policy with the weights of `checkpoint(step)`, LoRA adapters included.

        `precision`: float32, float64, or auto, which is float64 for models below 50 million parameters.
        """
        from gradtrace.policy.load import load_with_adapters
        from gradtrace.policy.policy import Policy
        from gradtrace.training.components import limit_threads
        from gradtrace.training.state import chosen_dtype

        found = self.ready(step) if isinstance(step, Checkpoint) else self.checkpoint(step)
        key = "--model" if found.folder != self.given and found.made_by == "plain" else "MODEL"
        model = load_with_adapters(str(found.weights), self.settings.model, trainable, key)
        model = model if trainable else model.eval()
        policy = Policy(model, next(model.parameters()).device, self.settings.rollout.temperature)
        limit_threads(policy, self.settings.trainer.cpu_threads)
        model.to(chosen_dtype(model, precision))
        return policy

    def optimizer(self, policy: Policy, *, kind: str = "checkpoint", lr: float = 0.0) -> torch.optim.Optimizer:
        """The optimizer that takes the step after the checkpoint: its own with its state (`checkpoint`), or a new
        `adamw` or `sgd`. `lr`: 0 means the rate that the run's schedule has for that step."""
        from gradtrace.training.state import optimizer_of

        return optimizer_of(self.settings, self.checkpoint(resumable=True), policy, kind, lr)

    def check_optimizer(self, kind: str, verb: str) -> None:
        """Raise where the optimizer state that is asked for is not stored. `verb`: what the command does with it."""
        found = self.checkpoint(resumable=True)
        name = FOREIGN if found.made_by == "plain" else OPTIMIZER
        if kind == "checkpoint" and not (found.folder / name).is_file():
            lacks = f"has no optimizer state ({OPTIMIZER} is not there)"
            lacks = "is a model without optimizer state" if found.made_by == "plain" else lacks
            raise NotStoredError(
                f"{found.folder} {lacks}: say whose update to {verb}, optimizer=adamw or optimizer=sgd"
            )

    # ------------------------------------------------------------ what judges, and what training has

    @property
    def _vocabulary_folder(self) -> Path | str:
        """A folder or a name that has the run's tokenizer."""
        if self.chosen is not None and self.chosen.made_by != "verl":
            return self.chosen.weights
        for found in self.checkpoints:
            return found.folder / "actor" / "huggingface" if found.made_by == "verl" else found.weights
        if self.settings.model.path:
            return self.settings.model.path
        raise self._no_weights(resumable=False)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        from gradtrace.policy.load import load_tokenizer

        return load_tokenizer(str(self._vocabulary_folder))

    def check_task(self) -> None:
        """Raise where the run does not say what its prompts are and what judges responses."""
        if self.is_model or any(word.startswith("task.name=") for word in self.overrides):
            return
        if not (self.path / "config.yaml").is_file():
            raise NotStoredError(f"{self.given} is no run: it has no config.yaml. Give one, e.g. runs/demo.")
        if self.config.get("engine") == "trl":
            raise NotStoredError(
                f"{self.given}/config.yaml is of TRL, which keeps neither the prompts nor the reward functions: say "
                "which, with task.name=dataset data.train=[FILE] and reward.name or reward.path"
            )

    @cached_property
    def task(self) -> Task:
        from gradtrace.training.components import build_task

        self.check_task()
        brings_its_own = self.settings.task.name in ("arithmetic", "calculator")  # tokenizer; any path will do
        path = self.path if brings_its_own else self._vocabulary_folder
        model = dataclasses.replace(self.settings.model, path=str(path))
        return build_task(dataclasses.replace(self.settings, model=model), None)[1]

    @cached_property
    def reward(self) -> RewardFunction:
        from gradtrace.tasks.rewards import RewardFunction
        from gradtrace.training.components import build_reward

        self.check_task()
        self.refuse_unasked_code()
        return build_reward(self.settings.reward) or RewardFunction(f"{self.task.name}.reward", self.task.reward)

    def sampler(self, policy: Policy) -> Sampler:
        """The run's sampler, which draws from `policy`."""
        from gradtrace.training.components import build_sampler

        return build_sampler(policy.model, self.task, self.settings.rollout)

    def next_step(self, kind: str = "checkpoint", lr: float = 0.0, precision: str = "auto") -> NextStep:
        """The training step after the checkpoint, ready to be taken: see `optimizer` and `policy`."""
        from gradtrace.training.state import NextStep

        self.refuse_unasked_code()
        return NextStep.of(self.settings, self.checkpoint(resumable=True), kind, lr, precision)

    def result_store(self, place: str, what: str, output: Path | None, **settings: Any) -> ResultStore:
        """Where a command keeps its results: `output`, or RUN/PLACE/step_N, …_2, _3, the first that is new or was begun
        by the same work: the same `settings` of the command and of the run, at the same checkpoint."""
        from gradtrace.trace.results import ResultStore, belongs_to

        found = self.checkpoint(resumable=True)
        identity = {
            "checkpoint": str(found.folder.resolve()),
            "seal": found.seal,
            "run": to_yaml(dataclasses.replace(self.settings, resume="")),
            **settings,
        }
        if output is None:
            around = Path(self.settings.trainer.runs_dir) if self.is_model else self.given
            base = around / place / found.folder.resolve().name
            more = (base.with_name(f"{base.name}_{number}") for number in itertools.count(2))
            folders = itertools.chain([base], more)
            output = next(each for each in folders if not each.exists() or belongs_to(each, what, identity))
        return ResultStore(output, what, identity)


def flat(section: Any, path: str = "") -> dict[str, Any]:
    """Nested dictionaries as a.b.c → value."""
    if not isinstance(section, dict):
        return {path: section}
    return {
        name: leaf
        for key, value in section.items()
        for name, leaf in flat(value, f"{path}.{key}" if path else str(key)).items()
    }
