"""States of real runs for `benchmarks.validity`: weights, optimizer state and a rollout, kept in a folder."""

from __future__ import annotations

import contextlib
import gc
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.common import REPOSITORY, smollm2_path
from gradtrace.algorithms import policy_loss
from gradtrace.batch import RolloutBatch
from gradtrace.config.loader import load_config
from gradtrace.instruments.contract import Reporter
from gradtrace.instruments.verify.trial import Trial, optimizer_like
from gradtrace.metrics import Timer
from gradtrace.trace.run_files import RunFiles
from gradtrace.training.components import Components, build_components
from gradtrace.training.loop import Trainer
from gradtrace.training.terminal import SilentDisplay


class AllKeptError(Exception):
    """Ends training once the last chosen state is kept: nobody needs the update that would follow."""


class Keeper(Reporter):
    """Before the update of the chosen steps: keep everything that a trial needs."""

    def __init__(self, parts: Components, steps: dict[int, Path], groups: int) -> None:
        self.parts, self.steps, self.groups = parts, steps, groups

    def plan(self, batch: RolloutBatch, step: int, sampled: RolloutBatch | None) -> tuple[RolloutBatch, None]:
        if step in self.steps and not self.steps[step].exists():
            rows = torch.arange(len(batch))[batch.group < self.groups]
            part = self.steps[step].with_suffix(".part")
            torch.save(self.kept(batch, rows), part)
            part.rename(self.steps[step])
        return batch, None

    def kept(self, batch: RolloutBatch, rows: Tensor) -> dict[str, Any]:
        parts, groups = self.parts, int(batch.group[rows].max()) + 1
        mini_batch = batch.select(rows)
        return {
            "model": parts.policy.model.state_dict(),
            "model_config": parts.policy.model.config,
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in parts.optimizer.adamw.param_groups],
            "names": [[self._name(p) for p in g["params"]] for g in parts.optimizer.adamw.param_groups],
            "state": {name: parts.optimizer.adamw.state.get(p, {}) for name, p in parts.optimizer.parameters.items()},
            "batch": {name: value.clone() for name, value in mini_batch.columns().items()},
            "prompts": batch.prompts[:groups],
            "loss": (parts.config.algorithm.policy_loss, parts.config.algorithm.policy_loss_options),
            "temperature": parts.policy.temperature,
            "grad_clip": parts.config.actor.optim.grad_clip,
        }

    def _name(self, parameter: Tensor) -> str:
        return next(name for name, p in self.parts.optimizer.parameters.items() if p is parameter)


class EndingKeeper(Keeper):
    def plan(self, batch: RolloutBatch, step: int, sampled: RolloutBatch | None) -> tuple[RolloutBatch, None]:
        found = super().plan(batch, step, sampled)
        if step >= max(self.steps):
            raise AllKeptError
        return found


def collect(overrides: list[str], steps: dict[int, Path], groups: int, runs: Path) -> None:
    """Train as the recipe does, up to the last of the steps and not through it, unless their states are there."""
    if all(path.exists() for path in steps.values()):
        return
    quiet = [
        *(f"trainer.runs_dir={runs.parent}", f"trainer.total_steps={max(steps)}", "trainer.validation.every=0"),
        *("trainer.checkpoint.every=0", "trainer.samples_every=0", "trainer.entropy_trace.enable=false"),
        *("trainer.influence_trace.enable=false", "trainer.blame.enable=false"),
        f"trainer.cpu_threads={torch.get_num_threads()}",
    ]
    parts = build_components(load_config([*overrides, *quiet]))
    name = next(iter(steps.values())).stem
    trainer = Trainer(parts, RunFiles(runs / name), SilentDisplay())
    trainer.steps.add("keeper", EndingKeeper(parts, steps, groups))
    with contextlib.suppress(AllKeptError):
        for step in itertools.count(1):
            batch, _ = trainer.experience.collect(parts.generators["rollout"], Timer())
            trainer.train_step(batch, step, Timer())
    del parts, trainer
    gc.collect()


def trial_of(path: Path, dtype: torch.dtype = torch.float64, number: int = 0, groups: int = 0) -> Trial:
    """In this precision, from a file of `collect`: its mini-batch `number` of so many groups (0: all of them)."""
    kept = torch.load(path, weights_only=False)
    model = AutoModelForCausalLM.from_config(kept["model_config"])
    model.load_state_dict(kept["model"])
    model = model.to(dtype).eval()
    optimizer = optimizer_like(torch.optim.AdamW, model, kept["groups"], kept["names"], kept["state"])
    batch = RolloutBatch(prompts=kept["prompts"], **kept["batch"])
    if groups:
        batch = batch.select(batch.group // groups == number)
    name, options = kept["loss"]
    return Trial(
        model,
        optimizer,
        batch,
        temperature=kept["temperature"],
        grad_clip=kept["grad_clip"],
        loss=policy_loss(name, **options),
    )


def countdown_overrides() -> list[str]:
    """SmolLM2-135M on the small countdown of its recipe, made at first use."""
    data = REPOSITORY / "data" / "countdown_easy"
    if not (data / "train.parquet").exists():
        command = "data prepare countdown --numbers 2 --largest 30 --operators +- --count 700 --validation 100"
        system = "Example: Use the numbers 3, 4 to get 7. 3 + 4 = 7"
        extra = ["--instruction", "", "--system-prompt", system, "--output", str(data)]
        subprocess.run([sys.executable, "-m", "gradtrace.cli", *command.split(), *extra], check=True)
    return [
        *("recipe=smollm2_countdown", f"model.path={smollm2_path()}", "model.device=cpu"),
        *(
            f"data.train=[{data / 'train.parquet'}]",
            "data.validation=[]",
            "trainer.traces=false",
            "rollout.n=6",
        ),
    ]
