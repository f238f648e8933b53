"""The model that a user means: a transformers folder, a hub name, a run, or a checkpoint of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from gradtrace.config import ModelConfig
from gradtrace.config.policy import looks_local
from gradtrace.errors import GradtraceError
from gradtrace.policy.policy import load_with_adapters
from gradtrace.tasks.tokenizer import load_tokenizer
from gradtrace.training.checkpoint import Checkpoints, check_complete


@dataclass(frozen=True)
class Loaded:
    model: Any
    tokenizer: PreTrainedTokenizerBase
    path: str
    """The place that the weights were loaded from."""


def resolve(name: str) -> str:
    """A folder that transformers (or peft) can load, or the hub name that was given."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if looks_local(name):
            raise GradtraceError(
                f"{name}: there is no such folder. Give a model's folder, a run, or a hub name."
            )
        return name
    if (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file():
        return str(folder)
    if (folder / "complete.json").is_file():
        check_complete(folder)
        return str(folder / "policy")
    if (folder / "policy").is_dir():  # a run that has come to its end
        return str(folder / "policy")
    latest = Checkpoints(folder).latest()
    if latest is not None:
        return str(latest / "policy")
    raise GradtraceError(
        f"{folder} is no model: it has no config.json, and no policy/ or checkpoints/ as a run has."
    )


def load(name: str, device: str = "auto") -> Loaded:
    path = resolve(name)
    config = ModelConfig(path=path, device=device)
    return Loaded(load_with_adapters(path, config, trainable=False).eval(), load_tokenizer(path), path)
