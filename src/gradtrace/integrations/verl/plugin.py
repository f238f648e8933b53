"""What verl finds of ours in its registries. Loaded by verl itself, in every process of a job."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

from gradtrace.errors import GradtraceError
from gradtrace.integrations.verl import cpu
from gradtrace.integrations.verl.cannot import NOT_TRACED, check_main
from gradtrace.integrations.verl.settings import read_settings

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


def stand_in_for_trl_value_head() -> None:
    """verl 0.9.1, where it finds TRL installed, mends a class of it that TRL 1.x no longer has, and fails at that
    before any model is built. An empty class under the name satisfies it; nothing else uses the name."""
    name = "trl.experimental.ppo"
    spec = importlib.util.find_spec("trl")
    if name in sys.modules or spec is None or not spec.submodule_search_locations:
        return
    folder = Path(spec.submodule_search_locations[0]) / "experimental" / "ppo"
    has_it = folder.is_dir() or folder.with_suffix(".py").is_file()
    if has_it or int(importlib.metadata.version("trl").split(".")[0]) < 1:
        return
    module = types.ModuleType(name)
    head = type("AutoModelForCausalLMWithValueHead", (), {})
    module.AutoModelForCausalLMWithValueHead = head  # type: ignore[attr-defined]
    sys.modules[name] = module


def take_over() -> None:
    """Named in VERL_USE_EXTERNAL_MODULES: our engine and trainer stand where verl's would be. They are verl's own
    until the configuration has a `gradtrace` section that asks for something."""
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
    from verl.workers.engine.base import EngineRegistry

    from gradtrace.integrations.verl.driver.trainer import GradtraceAsyncTrainer, GradtraceTrainer
    from gradtrace.integrations.verl.rank.engine import TracedFSDPEngine

    backends = EngineRegistry._engines["language_model"]["fsdp2"]
    if ("cuda", "nvidia") not in backends:
        EngineRegistry.register("language_model", ["fsdp", "fsdp2"], "cuda", "nvidia")(TracedFSDPEngine)
    TRAINER_REGISTRY["sync"] = GradtraceTrainer
    TRAINER_REGISTRY["colocate_async"] = GradtraceAsyncTrainer
    TRAINER_REGISTRY["separate_async"] = without_traces(TRAINER_REGISTRY["separate_async"], "separate_async")
    check_main(sys.orig_argv)


def without_traces(trainer: Any, mode: str) -> Any:
    """verl's trainer of this mode, which refuses a `gradtrace` section that asks for something."""

    class WithoutTraces(trainer):
        def __init__(self, config: Any) -> None:
            if read_settings(config).is_active:
                raise GradtraceError(f"trainer.v1.trainer_mode={mode} does not trace. {NOT_TRACED}.")
            super().__init__(config)

    return WithoutTraces


register()
if "gradtrace.integrations.verl" in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(","):
    take_over()
