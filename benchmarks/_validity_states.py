"""States of real runs for `benchmarks.validity`: weights, optimizer state and a rollout, kept in a folder."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.common import REPOSITORY, smollm2_path
from gradtrace.algorithms import accepted
from gradtrace.batch import RolloutBatch
from gradtrace.config_loader import load_config
from gradtrace.instruments.observer import StepObserver
from gradtrace.instruments.verify.copies import optimizer_like
from gradtrace.instruments.verify.trial import Trial
from gradtrace.trace.run_files import RunFiles
from gradtrace.training.loop import Trainer
from gradtrace.training.parts import Parts, build_parts
from gradtrace.training.terminal import SilentDisplay


class Keeper(StepObserver):
    """Before the update of the chosen steps: keep everything that a trial needs."""

    def __init__(self, parts: Parts, steps: dict[int, Path], groups: int) -> None:
        self.parts, self.steps, self.groups = parts, steps, groups

    def before_update(self, batch: RolloutBatch, step: int) -> RolloutBatch:
        if step in self.steps and not self.steps[step].exists():
            rows = torch.arange(len(batch))[batch.group < self.groups]
            part = self.steps[step].with_suffix(".part")
            torch.save(self.kept(batch, rows), part)
            part.rename(self.steps[step])
        return batch

    def kept(self, batch: RolloutBatch, rows: Tensor) -> dict[str, Any]:
        parts, assigned = self.parts, batch.response_lengths[rows].tolist()
        prompts = [torch.tensor(batch.prompts[g]) for g in batch.group[rows].tolist()]
        assert batch.rewards is not None and batch.advantages is not None
        return {
            "model": parts.policy.model.state_dict(),
            "model_config": parts.policy.model.config,
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in parts.optimizer.adamw.param_groups],
            "names": [[self._name(p) for p in g["params"]] for g in parts.optimizer.adamw.param_groups],
            "state": {name: parts.optimizer.adamw.state.get(p, {}) for name, p in parts.optimizer.parameters.items()},
            "sequences": [
                torch.cat([prompt, batch.responses[r, :length]])
                for prompt, r, length in zip(prompts, rows.tolist(), assigned, strict=True)
            ],
            "prompt_lengths": [len(prompt) for prompt in prompts],
            "group": batch.group[rows],
            "accepted": accepted(batch.rewards, batch.group)[rows],
            "advantages": batch.advantages[rows, 0].double(),
            "temperature": parts.policy.temperature,
            "grad_clip": parts.config.actor.optim.grad_clip,
        }

    def _name(self, parameter: Tensor) -> str:
        return next(name for name, p in self.parts.optimizer.parameters.items() if p is parameter)


def collect(overrides: list[str], steps: dict[int, Path], groups: int, runs: Path) -> None:
    """Train as the recipe does, up to the last of the steps, unless their states are there."""
    if all(path.exists() for path in steps.values()):
        return
    quiet = [
        *(f"trainer.runs_dir={runs.parent}", f"trainer.total_steps={max(steps)}", "trainer.validation.every=0"),
        *("trainer.checkpoint.every=0", "trainer.samples_every=0", "trainer.entropy_trace.enable=false"),
        *("trainer.influence_trace.enable=false", "trainer.blame.enable=false"),
        f"trainer.cpu_threads={torch.get_num_threads()}",
    ]
    parts = build_parts(load_config([*overrides, *quiet]))
    name = next(iter(steps.values())).stem
    Trainer(parts, RunFiles(runs / name), Keeper(parts, steps, groups), SilentDisplay()).fit()
    del parts
    gc.collect()


def trial_of(path: Path) -> Trial:
    """In float64, from a file of `collect`."""
    kept = torch.load(path, weights_only=False)
    model = AutoModelForCausalLM.from_config(kept["model_config"])
    model.load_state_dict(kept["model"])
    model = model.double().eval()
    optimizer = optimizer_like(torch.optim.AdamW, model, kept["groups"], kept["names"], kept["state"])
    names = ("sequences", "prompt_lengths", "group", "accepted", "advantages", "temperature", "grad_clip")
    return Trial(model, optimizer, **{name: kept[name] for name in names})


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
