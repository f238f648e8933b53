"""A TRL run's settings under the names that our viewer and readers know, and TRL's own beside them."""

from __future__ import annotations

import dataclasses
from typing import Any

import yaml

from gradtrace.integrations.trl.settings import TraceSettings

METRIC_NAMES = {
    "loss": "actor/loss",
    "grad_norm": "actor/grad_norm",
    "learning_rate": "actor/lr",
    "kl": "actor/kl_loss",
}
"""TRL's name in its logs → ours. Its other numbers keep theirs behind `trl/`."""


def run_config(trainer: Any, settings: TraceSettings) -> str:
    """The text of the run's config.yaml."""
    args = trainer.args
    influence: dict[str, Any] = {"enable": settings.influence is not None}
    if settings.influence is not None:
        influence |= dataclasses.asdict(settings.influence)
        influence["module_name_filter"] = list(settings.influence.module_name_filter)
    selection = settings.selection and dataclasses.replace(settings.selection, enable=True)
    rollouts = args.gradient_accumulation_steps / (args.steps_per_generation * trainer.num_iterations)
    config = {
        "engine": "trl",
        "model": {"path": str(trainer.model.config._name_or_path)},
        "data": {"train_batch_size": args.generation_batch_size // trainer.num_generations},
        "rollout": {
            "n": trainer.num_generations,
            "max_new_tokens": trainer.max_completion_length,
            "temperature": trainer.temperature,
        },
        "algorithm": {"advantage": "grpo", "policy_loss": trainer.loss_type, "kl_coef": trainer.beta},
        "actor": {"optim": {"lr": args.learning_rate}},
        "trainer": {
            "total_steps": int(trainer.state.max_steps * rollouts),
            "entropy_trace": {"enable": settings.entropy, "write_every": settings.write_every},
            "influence_trace": influence,
            "blame": {"enable": settings.blame, "write_every": settings.blame_every},
            "tracin": {"enable": selection is not None} | (dataclasses.asdict(selection) if selection else {}),
        },
        "trl": {name: value for name, value in args.to_sanitized_dict().items() if value is not None},
    }
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
