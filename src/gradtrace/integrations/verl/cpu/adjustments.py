"""The places where verl 0.9 assumes an accelerator, made to hold without one. None of this happens on a GPU."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import verl.utils.distributed
import verl.utils.model
import verl.workers.engine.fsdp.transformer_impl as fsdp_engine
import verl.workers.engine_workers
from verl.workers.engine.base import EngineRegistry


def apply() -> None:
    offload = fsdp_engine.CPUOffloadPolicy
    replacements: list[tuple[Any, str, Any]] = [
        (verl.utils.distributed, "initialize_global_process_group_ray", process_group_with_gloo),
        (verl.workers.engine_workers, "initialize_global_process_group_ray", process_group_with_gloo),
        # Memory can be pinned for an accelerator only; verl always asks for it.
        (fsdp_engine, "CPUOffloadPolicy", lambda pin_memory=True: offload(pin_memory=False)),
        (verl.utils.model, "load_valuehead_model", value_model_with_sdpa),
    ]
    for module, name, replacement in replacements:
        setattr(module, name, replacement)
    backends = EngineRegistry._engines.get("value_model", {}).get("fsdp2", {})
    if "cpu" not in backends:
        register = EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], device="cpu")
        register(fsdp_engine.FSDPEngineWithValueHead)


def process_group_with_gloo(timeout_second: float | None = None, backend: str | None = None) -> None:
    """verl would ask for the backend "cpu:gloo,cpu:gloo", which torch refuses."""
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo",
            rank=int(os.environ.get("RANK", 0)),
            world_size=int(os.environ.get("WORLD_SIZE", 1)),
            timeout=None if timeout_second is None else timedelta(seconds=timeout_second),
            init_method=os.environ.get("DIST_INIT_METHOD"),
        )


def value_model_with_sdpa(
    local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool, *args: Any, **options: Any
) -> Any:
    """Load the critic with sdpa: verl's own loader has flash attention written into it."""
    from transformers import AutoModelForTokenClassification

    return AutoModelForTokenClassification.from_pretrained(
        local_path,
        dtype=torch_dtype,
        config=model_config,
        attn_implementation="sdpa",
        trust_remote_code=False,
    )
