"""A checkpoint to look into: the settings of its run, its weights in full precision, and the optimizer that would go on
from it. `gradtrace probe` and `gradtrace verify` begin here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from gradtrace.algorithms import advantage
from gradtrace.batch import RolloutBatch
from gradtrace.config import Config
from gradtrace.config_loader import load_config
from gradtrace.errors import GradtraceError
from gradtrace.instruments.entropy_probe.passes import FullPrecision
from gradtrace.instruments.verify.copies import SMALL_MODEL
from gradtrace.policy.loss import fill_statistics
from gradtrace.policy.microbatch import MicroBatches
from gradtrace.policy.rollouts import add_advantages
from gradtrace.trace.atomic import unseal
from gradtrace.training.checkpoint import checkpoint_of, weights_seal, what_exists
from gradtrace.training.foreign_state import FOREIGN, load_foreign_state
from gradtrace.training.parts import Parts, build_parts, needs_reference
from gradtrace.training.state import OPTIMIZER, STATE


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint of a run, or a plain transformers folder."""

    checkpoint: Path
    run: Config
    is_plain: bool
    """A transformers folder without a run around it."""
    seal: str
    """A digest that changes with the checkpoint."""

    @staticmethod
    def of(checkpoint: Path, overrides: list[str]) -> Source:
        """`checkpoint`: RUN (its latest), RUN/checkpoints/step_N, or a transformers folder; `overrides` of the run's
        settings."""
        if not checkpoint.is_dir():
            raise GradtraceError(f"{checkpoint}: there is no such folder; {what_exists(checkpoint)}")
        plain = (checkpoint / "config.json").is_file()
        checkpoint = checkpoint.resolve() if plain else checkpoint_of(checkpoint.resolve())
        if plain:
            run = load_config([*overrides, f"model.path={checkpoint}"])
        else:
            run = load_config([f"resume={checkpoint.parent.parent}", *overrides])
        return Source(checkpoint, run, plain, weights_seal(checkpoint))

    def check_optimizer(self, optimizer: str, verb: str) -> None:
        """Refuse an optimizer state that is not there. `verb`: what the command does with the checkpoint."""
        if optimizer != "checkpoint":
            return
        if self.is_plain and (self.checkpoint / FOREIGN).is_file():
            return
        if self.is_plain:
            raise GradtraceError(
                f"{self.checkpoint} is a model without optimizer state: say whose update to {verb}, optimizer=adamw or "
                "optimizer=sgd"
            )
        if not (self.checkpoint / OPTIMIZER).is_file():
            raise GradtraceError(
                f"{self.checkpoint} has no optimizer state ({OPTIMIZER} is not there): {verb} another update with "
                "optimizer=adamw or optimizer=sgd"
            )

    def output(self, name: str, is_own: Callable[[Path], bool]) -> Path:
        """RUN/NAME/step_N, or …_2, _3: the first that is new or `is_own`, begun by the same command."""
        around = Path(self.run.trainer.runs_dir) if self.is_plain else self.checkpoint.parent.parent
        base = around / name / self.checkpoint.name
        number = 1
        while True:
            folder = base if number == 1 else base.with_name(f"{base.name}_{number}")
            if not folder.exists() or is_own(folder):
                return folder
            number += 1

    def load(self, optimizer: str = "checkpoint", lr: float = 0.0, precision: str = "auto") -> Loaded:
        """The run's parts at the checkpoint. `optimizer`: checkpoint, adamw or sgd; `lr`: 0 means that of the run's
        next step; `precision`: auto is float64 for small models."""
        run, checkpoint = self.run, self.checkpoint
        if not self.is_plain and not run.model.lora.rank and not needs_reference(run):
            # All weights are in the checkpoint: where the run started (the demo: a warm start) is not needed.
            model = dataclasses.replace(run.model, path=str(checkpoint / "policy"))
            run = dataclasses.replace(run, model=model)
        parts = build_parts(run, None if self.is_plain else checkpoint)
        parameters = sum(p.numel() for p in parts.policy.model.parameters())
        small = precision == "auto" and parameters < SMALL_MODEL
        dtype = torch.float64 if precision == "float64" or small else torch.float32
        parts.policy.model.to(dtype)  # parameters stay the same objects: the optimizer still knows them
        if parts.reference is not None and parts.reference.own is not None:
            parts.reference.own.model.to(dtype)
        step = 0
        if not self.is_plain:
            state = unseal((checkpoint / STATE).read_bytes())
            step = int(state["step"])
            if "data" in state:
                parts.task.load_state_dict(state["data"])
            else:  # converted from verl's, which was dealt the task's prompts in their order
                parts.task.next_prompts(step * run.data.train_batch_size)
        made = self._optimizer(parts, step, optimizer, lr)
        return Loaded(parts, FullPrecision.of(parts.policy), made, step, dtype)

    def _optimizer(self, parts: Parts, step: int, kind: str, lr: float) -> torch.optim.Optimizer:
        """The optimizer that takes the next step, at the learning rate of the step after `step`."""
        if kind == "sgd":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(
                parts.policy.trainable().values(), lr=self.run.actor.optim.lr
            )
        else:
            optimizer = parts.optimizer.adamw
            if kind == "checkpoint" and self.is_plain:
                load_foreign_state(parts.optimizer, parts.policy.model, self.checkpoint / FOREIGN)
            elif kind == "checkpoint":
                parts.optimizer.load_state_tensors(load_file(self.checkpoint / OPTIMIZER))
            if not self.is_plain:
                parts.optimizer.begin_step(step + 1)
        for group in optimizer.param_groups:
            group["lr"] = lr or group["lr"]
        if not all(float(group["lr"]) > 0 for group in optimizer.param_groups):
            raise GradtraceError(
                f"the learning rate of step {step + 1} is 0, and with it the update: give one, e.g. lr=1e-5"
            )
        return optimizer


@dataclasses.dataclass(frozen=True, eq=False)
class Loaded:
    """The parts of the run, its policy in full precision, and the optimizer that takes the next step."""

    parts: Parts
    policy: FullPrecision
    optimizer: torch.optim.Optimizer
    step: int
    """Training steps behind the checkpoint."""
    dtype: torch.dtype

    @property
    def rate(self) -> float:
        """Learning rate of the update."""
        return float(self.optimizer.param_groups[0]["lr"])

    def completed(self, batch: RolloutBatch, token_budget: int) -> RolloutBatch:
        """A judged rollout with everything that the loss needs: values, log-probs, advantages."""
        parts, algorithm = self.parts, self.parts.config.algorithm
        micro_batches = MicroBatches(batch, token_budget)
        rows = torch.arange(len(batch))
        if parts.critic is not None:
            batch = parts.critic.add_values(batch, micro_batches)
        # New columns are of the type of this one.
        batch = batch.replace(sampler_log_probs=batch.sampler_log_probs.to(self.dtype))
        batch = fill_statistics(self.policy, batch, micro_batches, rows)
        if parts.reference is not None:
            batch = parts.reference.add_log_probs(batch, micro_batches(rows))
        return add_advantages(batch, advantage(algorithm.advantage, **algorithm.advantage_options))
