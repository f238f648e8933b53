"""What verl finds of ours in its registries. Loaded by verl itself, in every process of a job."""

from __future__ import annotations

import os

from gradtrace.integrations.verl import cpu
from gradtrace.integrations.verl.compatibility import stand_in_for_trl_value_head

VENDOR = "gradtrace"


def register() -> None:
    """Register everything under names of our own: nothing of verl's is replaced. This is what the entry point
    `verl.plugins` does."""
    if os.environ.get("VERL_PLATFORM") == cpu.PLATFORM:
        cpu.load()  # its platform, before verl's engines are imported and ask for one
    stand_in_for_trl_value_head()
    from verl.workers.engine.base import EngineRegistry

    from gradtrace.integrations.verl.driver import trainer  # noqa: F401  (it registers itself)
    from gradtrace.integrations.verl.rank import losses
    from gradtrace.integrations.verl.rank.engine import TracedFSDPEngine

    losses.register()
    backends = EngineRegistry._engines.get("language_model", {}).get("fsdp2", {})
    for device in ("cuda", "npu"):
        if (device, VENDOR) not in backends:
            EngineRegistry.register("language_model", ["fsdp", "fsdp2"], device, VENDOR)(TracedFSDPEngine)
    if "cpu" not in backends:  # verl has none of its own
        EngineRegistry.register("language_model", ["fsdp", "fsdp2"], "cpu")(TracedFSDPEngine)


def take_over() -> None:
    """Named in VERL_USE_EXTERNAL_MODULES: our engine and trainer stand where verl's would be. They are verl's own
    until the configuration has a `gradtrace` section that asks for something."""
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
    from verl.workers.engine.base import EngineRegistry

    from gradtrace.integrations.verl.driver.trainer import GradtraceTrainer
    from gradtrace.integrations.verl.rank.engine import TracedFSDPEngine

    backends = EngineRegistry._engines["language_model"]["fsdp2"]
    if ("cuda", "nvidia") not in backends:
        EngineRegistry.register("language_model", ["fsdp", "fsdp2"], "cuda", "nvidia")(TracedFSDPEngine)
    TRAINER_REGISTRY["sync"] = GradtraceTrainer


register()
if "gradtrace.integrations.verl" in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(","):
    take_over()
