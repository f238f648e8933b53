"""The `gradtrace` section of a verl configuration: `+gradtrace.influence_trace.enable=true`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from gradtrace.config.keys import check_key, content_keys, schema_keys, typed
from gradtrace.instruments.findings import FindingsConfig
from gradtrace.instruments.registry import enabled, instruments, section_fields

SECTION = "gradtrace."


@dataclass
class VerlBase:
    """All but the sections of instruments. Everything is off until it is asked for."""

    run_dir: str = ""
    """Where traces and metrics go; empty: verl's trainer.default_local_dir. All nodes must see it."""
    trace_dir: str = ""
    """Traces go to TRACE_DIR/NAME instead of the run's folder. All nodes must see it."""
    findings: FindingsConfig = field(default_factory=FindingsConfig)
    """Thresholds of the detectors, which read the driver's batch and metrics."""
    policy_loss_options: dict[str, Any] = field(default_factory=dict)
    """Options of one of our losses (actor.policy_loss.loss_mode=archer), by their names in gradtrace.algorithms."""
    advantage_options: dict[str, Any] = field(default_factory=dict)
    """Options of one of our estimators (algorithm.adv_estimator=gradtrace_grpo)."""
    metrics: bool = False
    """Write metrics.jsonl and the state of the run, as the launcher needs them; on when anything is traced."""
    task: str = "dataset"
    """Name of the task, for the trace's readers."""

    @property
    def kinds(self) -> list[str]:
        """The instruments that write files."""
        on = enabled(self)
        return [name for name, one in instruments().items() if name in on and one.record is not None]

    @property
    def is_active(self) -> bool:
        return bool(self.kinds) or self.metrics


if TYPE_CHECKING:

    class VerlSettings(VerlBase):
        """With a section for every instrument."""

        def __init__(self, **values: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

else:
    VerlSettings = make_dataclass("VerlSettings", section_fields(), bases=(VerlBase,))
    VerlSettings.__module__ = __name__


def sections_for(settings: VerlSettings, cannot: Mapping[str, str]) -> SimpleNamespace:
    """The sections of the instruments that are on, without what is on by default and this job does not allow."""
    found = SimpleNamespace(findings=settings.findings)
    for one in enabled(settings).values():
        section = getattr(settings, one.key)
        is_default = section == one.default()
        if not (is_default and any(need in cannot for need in one.needed(section))):
            setattr(found, one.key, section)
    return found


def read_settings(config: Any) -> VerlSettings:
    """Our section of a whole verl configuration. An unknown key is an error that names the nearest valid one."""
    section = OmegaConf.select(config, "gradtrace", default=None)
    if section is None:
        return VerlSettings()
    content: Any = OmegaConf.to_container(section, resolve=True)
    for key in content_keys(content, free=("policy_loss_options", "advantage_options")):
        check_key(key, list(schema_keys(VerlSettings)), f"+{SECTION}{key}", prefix=SECTION)
    settings = typed(VerlSettings, section, prefix=SECTION)
    if not settings.run_dir:
        settings = dataclasses.replace(settings, run_dir=str(config.trainer.default_local_dir))
    return settings
