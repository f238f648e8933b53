"""A verl platform for machines without an accelerator."""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Iterator
from typing import Any

import torch
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
