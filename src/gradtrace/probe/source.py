"""What a probe is about: a checkpoint with its run's settings, loaded with the optimizer whose update is probed."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from gradtrace.config import Config
from gradtrace.config_loader import load_config, to_yaml
from gradtrace.errors import GradtraceError
from gradtrace.instruments.entropy_probe.passes import FullPrecision
from gradtrace.probe import preflight
from gradtrace.probe.config import ProbeConfig
from gradtrace.probe.phases import is_probe
from gradtrace.trace.atomic import unseal
from gradtrace.training.checkpoint import MARKER, checkpoint_of
from gradtrace.training.parts import Parts, build_parts, needs_reference
from gradtrace.training.state import OPTIMIZER, STATE

SMALL_MODEL = 50_000_000
"""Parameters below which float64 costs little."""


@dataclasses.dataclass(frozen=True)
class Source:
    """The run and the checkpoint that are probed, and with which settings."""

    checkpoint: Path
    config: ProbeConfig
    run: Config
    is_plain: bool
    """A transformers folder without a run around it."""
    identity: dict[str, Any]

    @staticmethod
    def of(checkpoint: Path, config: ProbeConfig, overrides: list[str]) -> Source:
        if not checkpoint.is_dir():
            raise GradtraceError(f"{checkpoint}: there is no such folder")
        plain = (checkpoint / "config.json").is_file()
        checkpoint = checkpoint.resolve() if plain else checkpoint_of(checkpoint.resolve())
        if plain:
            run = load_config([*overrides, f"model.path={checkpoint}"])
            files = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(checkpoint.iterdir())]
            seal = hashlib.sha256(repr(files).encode()).hexdigest()
        else:
            run = load_config([f"resume={checkpoint.parent.parent}", *overrides])
            seal = hashlib.sha256((checkpoint / MARKER).read_bytes()).hexdigest()
        if plain and config.optimizer == "checkpoint":
            raise GradtraceError(
                f"{checkpoint} is a model without optimizer state: say whose update to probe, optimizer=adamw or "
                "optimizer=sgd"
            )
        identity = {
            "checkpoint": str(checkpoint),
            "seal": seal,
            "probe": dataclasses.asdict(config),
            "run": to_yaml(dataclasses.replace(run, resume="")),
        }
        return Source(checkpoint, config, run, plain, identity)

    def default_output(self) -> Path:
        """RUN/probes/step_N, or …_2, _3: the first that is new or was begun by the same probe."""
        if self.is_plain:
            base = Path(self.run.trainer.runs_dir) / "probes" / self.checkpoint.name
        else:
            base = self.checkpoint.parent.parent / "probes" / self.checkpoint.name
        number = 1
        while True:
            folder = base if number == 1 else base.with_name(f"{base.name}_{number}")
            if not folder.exists() or is_probe(folder, self.identity):
                return folder
            number += 1

    def check(self) -> None:
        """Refuse, before the model is loaded, sampling that is not the policy's and an optimizer that is not there."""
        rollout = self.run.rollout
        preflight.check_sampling(rollout.temperature, rollout.top_p, rollout.top_k, "rollout")
        wanted = not self.is_plain and self.config.optimizer == "checkpoint"
        if wanted and not (self.checkpoint / OPTIMIZER).is_file():
            raise GradtraceError(
                f"{self.checkpoint} has no optimizer state ({OPTIMIZER} is not there): probe another update with "
                "optimizer=adamw or optimizer=sgd"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Loaded:
    """The parts of the run, its policy in the precision of the probe, and the optimizer whose update is probed."""

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

    @staticmethod
    def of(source: Source) -> Loaded:
        run, checkpoint, config = source.run, source.checkpoint, source.config
        if not source.is_plain and not run.model.lora.rank and not needs_reference(run):
            # All weights are in the checkpoint: where the run started (the demo: a warm start) is not needed.
            model = dataclasses.replace(run.model, path=str(checkpoint / "policy"))
            run = dataclasses.replace(run, model=model)
        parts = build_parts(run, None if source.is_plain else checkpoint)
        parameters = sum(p.numel() for p in parts.policy.model.parameters())
        small = config.precision == "auto" and parameters < SMALL_MODEL
        dtype = torch.float64 if config.precision == "float64" or small else torch.float32
        parts.policy.model.to(dtype)  # parameters stay the same objects: the optimizer still knows them
        if parts.reference is not None and parts.reference.own is not None:
            parts.reference.own.model.to(dtype)
        step = 0
        if not source.is_plain:
            state = unseal((checkpoint / STATE).read_bytes())
            step = int(state["step"])
            parts.task.load_state_dict(state["data"])
        policy = FullPrecision.of(parts.policy)
        return Loaded(parts, policy, make_optimizer(source, parts, step), step, dtype)


def make_optimizer(source: Source, parts: Parts, step: int) -> torch.optim.Optimizer:
    """The optimizer whose update is probed, at the learning rate of the step after `step`."""
    config, optim = source.config, source.run.actor.optim
    if config.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(parts.policy.trainable().values(), lr=optim.lr)
    else:
        optimizer = parts.optimizer.adamw
        if config.optimizer == "checkpoint":
            parts.optimizer.load_state_tensors(load_file(source.checkpoint / OPTIMIZER))
        if not source.is_plain:
            parts.optimizer.begin_step(step + 1)
    for group in optimizer.param_groups:
        group["lr"] = config.lr or group["lr"]
    if not all(float(group["lr"]) > 0 for group in optimizer.param_groups):
        raise GradtraceError(
            f"the learning rate of step {step + 1} is 0, and with it the update: give one, e.g. lr=1e-5"
        )
    return optimizer
