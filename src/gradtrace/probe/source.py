"""What a probe is about: a checkpoint with its run's settings, and the settings of the probe."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from gradtrace.config_loader import to_yaml
from gradtrace.integrations.verl.launch.checkpoints import opened
from gradtrace.probe import preflight
from gradtrace.probe.config import ProbeConfig
from gradtrace.trace.phases import belongs_to
from gradtrace.training.source import Source


@dataclasses.dataclass(frozen=True)
class ProbeSource(Source):
    config: ProbeConfig

    @staticmethod
    def to_probe(checkpoint: Path, config: ProbeConfig, overrides: list[str]) -> ProbeSource:
        found = Source.of(opened(checkpoint), overrides)
        return ProbeSource(found.checkpoint, found.run, found.is_plain, found.seal, config)

    @property
    def identity(self) -> dict[str, Any]:
        """What a folder with results is about: with any other identity it belongs to another probe."""
        return {
            "checkpoint": str(self.checkpoint),
            "seal": self.seal,
            "probe": dataclasses.asdict(self.config),
            "run": to_yaml(dataclasses.replace(self.run, resume="")),
        }

    def default_output(self) -> Path:
        return self.output("probes", lambda folder: belongs_to(folder, "probe", self.identity))

    def check(self) -> None:
        """Refuse, before the model is loaded, sampling that is not the policy's and an optimizer that is not there."""
        self.check_optimizer(self.config.optimizer, "probe")
        rollout = self.run.rollout
        preflight.check_sampling(
            rollout.temperature, rollout.top_p, rollout.top_k, "rollout", rollout.temperature
        )
