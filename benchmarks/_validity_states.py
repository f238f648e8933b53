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
from gradtrace.algorithms import accepted
from gradtrace.batch import RolloutBatch
from gradtrace.config.loader import load_config
from gradtrace.instruments.contract import Reporter
from gradtrace.instruments.verify.trial import Trial, optimizer_like
from gradtrace.metrics import Timer
from gradtrace.policy.policy import KeepDouble
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


class SharedPrompts(Trial):
    """A trial that computes a group's prompt once when it measures: most of its tokens are prompt on SmolLM2."""

    def contrasts(self, groups: list[int]) -> Tensor:
        """[G]: of each group."""
        found = []
        for g in groups:
            members = self.members[g]
            means = torch.stack([values.mean() for values in self._behind_one_prompt(members)])
            good = self.accepted[members]
            found.append(means[good].mean() - means[~good].mean())
        return torch.stack(found)

    def _behind_one_prompt(self, responses: list[int]) -> list[Tensor]:
        """The log-probs of each response's tokens, [T_r] each; all of them are answers to one prompt."""
        prompt = self.sequences[responses[0]][: self.prompt_lengths[responses[0]]]
        answers = [self.sequences[r][len(prompt) :] for r in responses]
        ids = torch.nn.utils.rnn.pad_sequence(answers, batch_first=True)
        double = next(self.model.parameters()).dtype == torch.float64
        with KeepDouble() if double else contextlib.nullcontext():
            read = self.model(input_ids=prompt[None], use_cache=True, logits_to_keep=1)
            read.past_key_values.batch_repeat_interleave(len(ids))
            written = self.model(input_ids=ids, past_key_values=read.past_key_values).logits[:, :-1]
            logits = torch.cat([read.logits.expand(len(ids), -1, -1), written], 1) / self.temperature
            found = torch.log_softmax(logits, -1).gather(-1, ids[..., None]).squeeze(-1)
        return [values[: len(own)] for values, own in zip(found, answers, strict=True)]


def trial_of(path: Path, dtype: torch.dtype = torch.float64) -> Trial:
    """In this precision, from a file of `collect`."""
    kept = torch.load(path, weights_only=False)
    model = AutoModelForCausalLM.from_config(kept["model_config"])
    model.load_state_dict(kept["model"])
    model = model.to(dtype).eval()
    optimizer = optimizer_like(torch.optim.AdamW, model, kept["groups"], kept["names"], kept["state"])
    names = ("sequences", "prompt_lengths", "group", "accepted", "advantages", "temperature", "grad_clip")
    # Two passes for one pay where more than half of the tokens are prompt.
    kind = SharedPrompts if 2 * sum(kept["prompt_lengths"]) > sum(map(len, kept["sequences"])) else Trial
    return kind(model, optimizer, **{name: kept[name] for name in names})


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
