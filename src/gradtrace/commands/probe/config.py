"""Settings of `gradtrace probe`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from gradtrace.attribution.config import choice, number
from gradtrace.config.keys import check_key, closest, schema_keys, typed
from gradtrace.config.root import Config
from gradtrace.errors import GradtraceError


@dataclass
class ProbeConfig:
    evaluation_prompts: int = number(128, minimum=2)
    """Prompts of E, the batch that entropy is measured on: held-out prompts of the task."""
    evaluation_n: int = number(1, minimum=1)
    """Responses per prompt of E. More prompts tell more than more responses."""
    update_prompts: int = number(16, minimum=1)
    """Prompts of U, the batch of the update: the next training prompts of the run."""
    update_n: int = number(8, minimum=1)
    """Responses per prompt of U."""
    evaluation_batch: str = ""
    """A file with E instead of sampling it (`evaluation.safetensors` of another probe); sampled by this policy."""
    update_batch: str = ""
    """A file with U instead of sampling it (`update.safetensors` of another probe)."""
    optimizer: str = choice("checkpoint", "adamw", "sgd")
    """Whose update: of the checkpoint's optimizer from its saved state, or of a new AdamW or plain SGD."""
    lr: float = number(0.0, minimum=0)
    """Learning rate of the update; 0: the one that the run's schedule has for the next step."""
    eta: list[float] = field(default_factory=lambda: [0.01, 0.03, 0.1, 0.3, 1.0, 3.0])
    """Step sizes to measure at, in units of the learning rate. 1 is always measured."""
    fresh: bool = True
    """Measure by sampling anew from the moved policy as well (the same random numbers, so that noise cancels)."""
    precision: str = choice("auto", "float32", "float64")
    """Precision of the whole probe; auto is float64 for models below 50 million parameters."""
    token_budget: int = number(16384, minimum=1)
    """Tokens (padding counted) in one pass. Memory depends on it, results do not."""
    seed: int = 0
    """Seed of the sampling."""

    def validate(self, path: str) -> None:
        if not all(eta > 0 for eta in self.eta):
            raise GradtraceError(f"{path}eta={self.eta}: step sizes are positive, in units of the learning rate")


def load_probe_config(file: Path | None, overrides: list[str]) -> tuple[ProbeConfig, list[str]]:
    """The probe's settings, and overrides of the run's configuration.

    A file holds keys of `ProbeConfig`, and under `run` a list of overrides of the run's settings. Of the command
    line's KEY=VALUE words, those that are no key of the probe belong to the run.
    """
    content = _read(file) if file is not None else {}
    run = content.pop("run", [])
    if not isinstance(run, list) or not all(isinstance(word, str) for word in run):
        raise GradtraceError(f"{file}: `run` is a list of overrides, e.g. [rollout.max_new_tokens=64]")
    own = list(ProbeConfig.__dataclass_fields__)
    for key in content:
        check_key(key, own, f"{file}, key '{key}'")
    words: list[str] = []
    known = [*own, *schema_keys(Config)]
    for word in overrides:
        key = word.partition("=")[0]
        if "=" not in word or (key not in known and "." not in key):
            raise GradtraceError(
                f"'{word}' is not an override of the probe or of its run. Did you mean '{closest(key, known)}=…'?"
            )
        (words if key in own else run).append(word)
    config = typed(ProbeConfig, content, OmegaConf.from_dotlist(words))
    config.eta = sorted({*config.eta, 1.0})
    return config, run


def _read(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise GradtraceError(f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise GradtraceError(f"{file} holds no settings")
    return content
