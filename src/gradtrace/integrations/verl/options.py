"""The `gradtrace` section of a verl configuration: `+gradtrace.influence_trace.enable=true`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf

from gradtrace.attribution.config import number
from gradtrace.config import (
    BlameConfig,
    EntropyProbeConfig,
    EntropyTraceConfig,
    FindingsConfig,
    InfluenceTraceConfig,
    TracinConfig,
)
from gradtrace.config.keys import check_key, content_keys, schema_keys, typed
from gradtrace.trace.kinds import enabled_kinds


@dataclass
class VerlOptions:
    """Everything is off until it is asked for."""

    run_dir: str = ""
    """Where traces and metrics go; empty: verl's trainer.default_local_dir. All nodes must see it."""
    trace_dir: str = ""
    """Traces go to TRACE_DIR/NAME instead of the run's folder. All nodes must see it."""
    entropy_trace: EntropyTraceConfig = field(default_factory=EntropyTraceConfig)
    influence_trace: InfluenceTraceConfig = field(default_factory=InfluenceTraceConfig)
    blame: BlameConfig = field(default_factory=BlameConfig)
    entropy_probe: EntropyProbeConfig = field(default_factory=EntropyProbeConfig)
    """Its held-out prompts are the first of data.val_files."""
    tracin: TracinConfig = field(default_factory=TracinConfig)
    """Its `val_files` are parquet files as verl reads them; without any, prompts are those of data.val_files."""
    findings: FindingsConfig = field(default_factory=FindingsConfig)
    """Thresholds of the detectors, which read the driver's batch and metrics."""
    mismatch_every: int = number(10, minimum=0)
    """Steps between measurements of mismatch/share_of_update, made where sampler and trainer disagree; 0 is never."""
    policy_loss_options: dict[str, Any] = field(default_factory=dict)
    """Options of one of our losses (actor.policy_loss.loss_mode=archer), by their names in gradtrace.algorithms."""
    advantage_options: dict[str, Any] = field(default_factory=dict)
    """Options of one of our estimators (algorithm.adv_estimator=gradtrace_grpo)."""
    metrics: bool = False
    """Write metrics.jsonl and the state of the run, as the launcher needs them; on when anything is traced."""
    task: str = "dataset"
    """Name of the task, for the trace's readers."""

    @property
    def is_active(self) -> bool:
        return bool(enabled_kinds(self)) or self.metrics


def read_options(config: Any) -> VerlOptions:
    """Our section of a whole verl configuration. An unknown key is an error that names the nearest valid one."""
    section = OmegaConf.select(config, "gradtrace", default=None)
    if section is None:
        return VerlOptions()
    content: Any = OmegaConf.to_container(section, resolve=True)
    for key in content_keys(content, free=("policy_loss_options", "advantage_options")):
        check_key(key, list(schema_keys(VerlOptions)), f"+gradtrace.{key}", prefix="gradtrace.")
    options = typed(VerlOptions, section, prefix="gradtrace.")
    if not options.run_dir:
        options = dataclasses.replace(options, run_dir=str(config.trainer.default_local_dir))
    return options
