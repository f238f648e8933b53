"""What a checkpoint holds, and how it gets in and out: tensors as safetensors, the rest as JSON, no pickles."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gradtrace.trace.atomic import seal, unseal
from gradtrace.training.parts import Parts

STATE = "state.json"
RNG = "rng.safetensors"
OPTIMIZER = "optimizer.safetensors"
CRITIC_OPTIMIZER = "critic_optimizer.safetensors"
OBSERVERS = "observers.safetensors"


@dataclass(frozen=True)
class LightState:
    """All that a step consumes before it touches the weights: random numbers and prompts."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]

    @staticmethod
    def of(parts: Parts) -> LightState:
        tensors = {name: generator.get_state() for name, generator in parts.generators.items()}
        tensors["torch"] = torch.get_rng_state()
        if torch.cuda.is_available():
            tensors["cuda"] = torch.cuda.get_rng_state()
        # A user's reward function may draw from Python's and NumPy's generators.
        numpy_state: dict[str, Any] = numpy.random.get_state(legacy=False)
        numpy_state["state"]["key"] = numpy_state["state"]["key"].tolist()
        return LightState(
            tensors,
            {
                "data": parts.task.state_dict(),
                "python_random": random.getstate(),
                "numpy_random": numpy_state,
            },
        )

    def restore(self, parts: Parts) -> None:
        for name, generator in parts.generators.items():
            generator.set_state(self.tensors[name])
        torch.set_rng_state(self.tensors["torch"])
        if "cuda" in self.tensors and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.tensors["cuda"])
        parts.task.load_state_dict(self.values["data"])
        version, numbers, gauss = self.values["python_random"]
        random.setstate((version, tuple(numbers), gauss))
        numpy.random.set_state(self.values["numpy_random"])


def save_state(folder: Path, parts: Parts, step: int) -> None:
    """Everything that the steps after `step` depend on."""
    parts.policy.model.save_pretrained(folder / "policy")
    _order_adapter_names(folder / "policy" / "adapter_config.json")
    parts.task.tokenizer.save_pretrained(folder / "policy")
    save_file(parts.optimizer.state_tensors(), folder / OPTIMIZER)
    if parts.critic is not None:
        parts.critic.save(folder / "critic")
        save_file(parts.critic.optimizer.state_tensors(), folder / CRITIC_OPTIMIZER)
    light = LightState.of(parts)
    save_file(light.tensors, folder / RNG)
    (folder / STATE).write_bytes(seal({"step": step, **light.values}))


def _order_adapter_names(config: Path) -> None:
    """peft writes a set of module names in any order; checkpoints of equal runs shall be equal to the last bit."""
    if not config.is_file():
        return
    settings = json.loads(config.read_text())
    if isinstance(settings["target_modules"], list):
        settings["target_modules"].sort()
        config.write_text(json.dumps(settings, indent=2, sort_keys=True))


def save_observer_state(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Save what instruments carry from step to step; there is no file where that is nothing."""
    if tensors:
        save_file(tensors, folder / OBSERVERS)


def load_observer_state(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / OBSERVERS) if (folder / OBSERVERS).is_file() else {}


def load_state(folder: Path, parts: Parts) -> int:
    """Restore all but the weights, which `build_parts` loads; returns the step."""
    values = unseal((folder / STATE).read_bytes())
    parts.optimizer.load_state_tensors(load_file(folder / OPTIMIZER))
    if parts.critic is not None:
        parts.critic.optimizer.load_state_tensors(load_file(folder / CRITIC_OPTIMIZER))
    LightState(load_file(folder / RNG), values).restore(parts)
    return int(values["step"])
