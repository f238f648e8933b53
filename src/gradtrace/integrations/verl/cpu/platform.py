"""A verl platform for machines without an accelerator, and what verl assumes of one."""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from gradtrace.integrations.verl.cpu import PLATFORM


def device_module() -> types.ModuleType:
    """`torch.cpu` with the functions of `torch.cuda` that verl calls."""
    module = types.ModuleType("gradtrace_cpu_device")
    nothing = ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "manual_seed", "manual_seed_all")
    zero = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    vars(module).update({name: value for name, value in vars(torch.cpu).items() if not name.startswith("__")})
    vars(module).update(dict.fromkeys(nothing, lambda *args, **options: None))
    vars(module).update(
        dict.fromkeys(zero, lambda *args, **options: 0),
        mem_get_info=lambda *args: (memory, memory),
        get_rng_state=lambda *args: torch.get_rng_state(),
        set_rng_state=lambda state, *args: torch.set_rng_state(state),
        get_device_name=lambda *args: "cpu",
    )
    return module


class PlatformCPU(PlatformBase):
    _module = device_module()

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> types.ModuleType:
        return self._module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Chosen by VERL_PLATFORM=cpu only: a driver without GPU of a GPU job must not take it."""
        return False

    def current_device(self) -> Any:
        return "cpu"  # verl writes tensor.to(current_device())

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "GRADTRACE_CPU_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"  # verl places workers by this resource; `ray.init(num_gpus=N)` claims as many as there are workers

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


def register() -> None:
    PlatformRegistry.register(platform=PLATFORM)(PlatformCPU)


def adjust() -> None:
    """Make the places where verl 0.9 assumes an accelerator hold without one. None of this happens on a GPU."""
    # After `register`: these modules ask for the platform.
    import verl.utils.distributed
    import verl.utils.model
    import verl.workers.engine.fsdp.transformer_impl as fsdp_engine
    import verl.workers.engine_workers
    from verl.workers.engine.base import EngineRegistry

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
