"""What a checkpoint holds, how it gets in and out (tensors as safetensors, the rest as JSON, no pickles), and the step
that comes after it."""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gradtrace.algorithms import advantage
from gradtrace.batch import RolloutBatch
from gradtrace.config.root import Config
from gradtrace.errors import GradtraceError
from gradtrace.instruments.entropy_probe.passes import precise
from gradtrace.policy.loss import fill_statistics
from gradtrace.policy.microbatch import MicroBatches
from gradtrace.policy.optimizer import Optimizer
from gradtrace.policy.policy import Policy
from gradtrace.policy.rollouts import add_advantages
from gradtrace.trace.files import seal, unseal
from gradtrace.training.checkpoint import FOREIGN, OPTIMIZER, STATE, Checkpoint
from gradtrace.training.components import Components, build_components, needs_reference

RNG = "rng.safetensors"
CRITIC_OPTIMIZER = "critic_optimizer.safetensors"
OBSERVERS = "observers.safetensors"
OF_ADAM = ("step", "exp_avg", "exp_avg_sq")
LARGE = 50_000_000
"""Parameters from which `precision=auto` is float32: float64 costs too much."""


@dataclass(frozen=True)
class LightState:
    """All that a step consumes before it touches the weights: random numbers and prompts."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]

    @staticmethod
    def of(components: Components) -> LightState:
        tensors = {name: generator.get_state() for name, generator in components.generators.items()}
        tensors["torch"] = torch.get_rng_state()
        if torch.cuda.is_available():
            tensors["cuda"] = torch.cuda.get_rng_state()
        # A user's reward function may draw from Python's and NumPy's generators.
        numpy_state: dict[str, Any] = numpy.random.get_state(legacy=False)
        numpy_state["state"]["key"] = numpy_state["state"]["key"].tolist()
        return LightState(
            tensors,
            {
                "data": components.task.state_dict(),
                "python_random": random.getstate(),
                "numpy_random": numpy_state,
            },
        )

    def restore(self, components: Components) -> None:
        for name, generator in components.generators.items():
            generator.set_state(self.tensors[name])
        torch.set_rng_state(self.tensors["torch"])
        if "cuda" in self.tensors and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.tensors["cuda"])
        components.task.load_state_dict(self.values["data"])
        version, numbers, gauss = self.values["python_random"]
        random.setstate((version, tuple(numbers), gauss))
        numpy.random.set_state(self.values["numpy_random"])


def save_state(folder: Path, components: Components, step: int, of_instruments: dict[str, Tensor]) -> None:
    """Everything that the steps after `step` depend on. `of_instruments`: what they carry from step to step."""
    components.policy.model.save_pretrained(folder / "policy")
    _order_adapter_names(folder / "policy" / "adapter_config.json")
    components.task.tokenizer.save_pretrained(folder / "policy")
    save_file(components.optimizer.state_tensors(), folder / OPTIMIZER)
    if components.critic is not None:
        components.critic.save(folder / "critic")
        save_file(components.critic.optimizer.state_tensors(), folder / CRITIC_OPTIMIZER)
    light = LightState.of(components)
    save_file(light.tensors, folder / RNG)
    (folder / STATE).write_bytes(seal({"step": step, **light.values}))
    if of_instruments:
        save_file(of_instruments, folder / OBSERVERS)


def _order_adapter_names(config: Path) -> None:
    """peft writes a set of module names in any order; checkpoints of equal runs shall be equal to the last bit."""
    if not config.is_file():
        return
    settings = json.loads(config.read_text())
    if isinstance(settings["target_modules"], list):
        settings["target_modules"].sort()
        config.write_text(json.dumps(settings, indent=2, sort_keys=True))


def load_observer_state(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / OBSERVERS) if (folder / OBSERVERS).is_file() else {}


def load_state(folder: Path, components: Components) -> int:
    """Restore all but the weights, which `build_components` loads; returns the step."""
    values = unseal((folder / STATE).read_bytes())
    components.optimizer.load_state_tensors(load_file(folder / OPTIMIZER))
    if components.critic is not None:
        components.critic.optimizer.load_state_tensors(load_file(folder / CRITIC_OPTIMIZER))
    LightState(load_file(folder / RNG), values).restore(components)
    return int(values["step"])


# ---------------------------------------------------------------- the optimizer's


def load_optimizer(optimizer: Optimizer, model: Any, checkpoint: Checkpoint) -> None:
    """Take over the state that is stored with the checkpoint, ours or that of transformers' Trainer."""
    file = checkpoint.optimizer_file
    if file is None:
        raise GradtraceError(f"{checkpoint.folder} has no optimizer state: neither {OPTIMIZER} nor {FOREIGN} is there")
    if file.name == FOREIGN:
        load_foreign_state(optimizer, model, file)
    else:
        optimizer.load_state_tensors(load_file(file))


def load_foreign_state(optimizer: Optimizer, model: Any, file: Path) -> None:
    """Take over Adam's state from `file`, optimizer.pt of transformers' Trainer: moments, step counts, betas, ε, rate.

    The file numbers parameters in the order in which the Trainer groups them: those with weight decay, then the others.
    """
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        states = [saved["state"][number] for number in numbers]
        settings = {key: saved["param_groups"][0][key] for key in ("betas", "eps", "lr")}
        tensors = [{key: torch.as_tensor(state[key]) for key in OF_ADAM} for state in states]
    except Exception as error:  # not a file of torch, or the state of another optimizer
        raise _unread(file, f"it holds no state of Adam: {type(error).__name__} {error}") from error
    names = _trainer_order(model)
    if len(names) != len(tensors):
        raise _unread(file, f"it has {len(tensors)} parameters, the model {len(names)} trainable ones")
    for name, state in zip(names, tensors, strict=True):
        if state["exp_avg_sq"].shape != optimizer.parameters[name].shape:
            found, wanted = list(state["exp_avg_sq"].shape), list(optimizer.parameters[name].shape)
            raise _unread(file, f"it has a parameter {found} in the place of {name} {wanted}")
    optimizer.load_state_tensors(
        {f"{key}/{name}": value for name, state in zip(names, tensors, strict=True) for key, value in state.items()}
    )
    for group in optimizer.adamw.param_groups:
        group.update(settings)


def _trainer_order(model: Any) -> list[str]:
    from transformers import Trainer

    with_decay = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return sorted(trainable, key=lambda name: name not in with_decay)


def _unread(file: Path, why: str) -> GradtraceError:
    return GradtraceError(
        f"{file} cannot be read as the state of this model's optimizer: {why}. Move it away to go on without"
    )


# ---------------------------------------------------------------- the step after it


@dataclass(frozen=True, eq=False)
class NextStep:
    """The training step after a checkpoint, before it is taken: `gradtrace probe` and `verify` look into it."""

    components: Components
    policy: Policy
    optimizer: torch.optim.Optimizer
    """It takes the step."""
    step: int
    """Training steps behind the checkpoint."""
    dtype: torch.dtype

    @staticmethod
    def of(settings: Config, checkpoint: Checkpoint, kind: str, lr: float, precision: str) -> NextStep:
        """Build what training builds, at the weights of the checkpoint and the prompts that come next."""
        embedded = checkpoint.made_by == "embedded"
        if embedded and not settings.model.lora.rank and not needs_reference(settings):
            # All weights are in the checkpoint: where the run started (the demo: a warm start) is not needed.
            model = dataclasses.replace(settings.model, path=str(checkpoint.weights))
            settings = dataclasses.replace(settings, model=model)
        components = build_components(settings, checkpoint.folder if embedded else None)
        dtype = chosen_dtype(components.policy.model, precision)
        components.policy.model.to(dtype)
        if components.reference is not None and components.reference.own is not None:
            components.reference.own.model.to(dtype)
        step = 0
        if embedded:
            state = unseal((checkpoint.folder / STATE).read_bytes())
            step = int(state["step"])
            if "data" in state:
                components.task.load_state_dict(state["data"])
            else:  # converted from verl's, which was dealt the task's prompts in their order
                components.task.next_prompts(step * settings.data.train_batch_size)
        optimizer = optimizer_of(settings, checkpoint, components.policy, kind, lr)
        return NextStep(components, precise(components.policy), optimizer, step, dtype)

    @property
    def rate(self) -> float:
        """Learning rate of the update."""
        return float(self.optimizer.param_groups[0]["lr"])


def completed(components: Components, policy: Policy, batch: RolloutBatch, token_budget: int) -> RolloutBatch:
    """A judged rollout with what a loss may need besides: values, log-probs, advantages."""
    algorithm, micro_batches = components.config.algorithm, MicroBatches(batch, token_budget)
    rows = torch.arange(len(batch))
    if components.critic is not None:
        batch = components.critic.add_values(batch, micro_batches)
    # New columns are of the type of this one.
    batch = batch.replace(sampler_log_probs=batch.sampler_log_probs.to(next(policy.model.parameters()).dtype))
    batch = fill_statistics(policy, batch, micro_batches, rows)
    if components.reference is not None:
        batch = components.reference.add_log_probs(batch, micro_batches(rows))
    return add_advantages(batch, advantage(algorithm.advantage, **algorithm.advantage_options))


def optimizer_of(
    settings: Config, checkpoint: Checkpoint, policy: Policy, kind: str, lr: float
) -> torch.optim.Optimizer:
    """The optimizer that takes the next step: the checkpoint's with its state, or a new `adamw` or `sgd`."""
    step = (checkpoint.step or 0) + 1
    optimizer: torch.optim.Optimizer
    if kind == "sgd":
        optimizer = torch.optim.SGD(policy.trainable().values(), lr=settings.actor.optim.lr)
    else:
        ours = Optimizer(policy.trainable(), settings.actor.optim, settings.trainer.total_steps)
        if kind == "checkpoint":
            load_optimizer(ours, policy.model, checkpoint)
        if checkpoint.made_by == "embedded":
            ours.begin_step(step)
        optimizer = ours.adamw
    for group in optimizer.param_groups:
        group["lr"] = lr or group["lr"]
    if not all(float(group["lr"]) > 0 for group in optimizer.param_groups):
        raise GradtraceError(f"the learning rate of step {step} is 0, and with it the update: give one, e.g. lr=1e-5")
    return optimizer


def chosen_dtype(model: Any, precision: str) -> torch.dtype:
    """`float32`, `float64`, or for `auto` float64 where it costs little."""
    is_large = sum(p.numel() for p in model.parameters()) >= LARGE
    return torch.float32 if precision == "float32" or (precision == "auto" and is_large) else torch.float64
