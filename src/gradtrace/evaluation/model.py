"""The model that a user means: a transformers folder, a hub name, a run, or a checkpoint of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from gradtrace.config import ModelConfig
from gradtrace.policy.policy import load_with_adapters
from gradtrace.tasks.tokenizer import load_tokenizer
from gradtrace.training.checkpoint import model_of


@dataclass(frozen=True)
class Loaded:
    model: Any
    tokenizer: PreTrainedTokenizerBase
    path: str
    """The place that the weights were loaded from."""


def load(name: str, device: str = "auto") -> Loaded:
    path = model_of(name)
    config = ModelConfig(path=path, device=device)
    return Loaded(load_with_adapters(path, config, trainable=False).eval(), load_tokenizer(path), path)
