"""A second device without the hardware: tensors whose numbers lie in main memory and whose device is not the CPU.

torch lets a device be written in Python. This one, `standin`, computes every operation on the CPU and refuses what CUDA
refuses: an operation on tensors of two devices. So code that forgets to move something fails here as it would on a GPU,
and code that does not gives numbers, which are held against the CPU's. It also counts where the host waits for the
device: `.item()`, `.tolist()`, copies to the host, and operations whose result's shape depends on values.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "standin"
WAITING = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "unique", "_unique2", "unique_dim"}
"""Operations that answer the host, which must wait for all that was queued before."""
MOVING = {"_to_copy", "copy_", "_copy_from"}


class _Backend(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_setup_privateuseone_for_python_backend(NAME, _Backend())
DEVICE = torch.device(NAME, 0)


class OnDevice(Tensor):
    """A tensor of the device; `host` has its numbers."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> OnDevice:
        made: OnDevice = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=DEVICE,
        )
        made.host = host
        return made

    def __repr__(self, **options: Any) -> str:
        return f"{NAME}:{self.host!r}"

    def tolist(self) -> Any:
        waits.note("tolist")
        return self.host.tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


class Waits:
    """How often the host waited for the device, by what it did and by the file of ours that asked for it."""

    def __init__(self) -> None:
        self.places: Counter[tuple[str, str]] = Counter()

    def note(self, what: str) -> None:
        frame = sys._getframe(1)
        while frame is not None and "/src/gradtrace/" not in frame.f_code.co_filename:
            frame = frame.f_back  # type: ignore[assignment]
        place = "elsewhere" if frame is None else frame.f_code.co_filename.split("/src/gradtrace/")[1]
        self.places[what, place] += 1

    def of(self, folder: str) -> dict[tuple[str, str], int]:
        """Waits that files in this folder of the package asked for; copies to the device do not wait."""
        return {key: n for key, n in self.places.items() if key[1].startswith(folder) and key[0] != "to_device"}


waits = Waits()


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.split("::")[1]
    first = args[0] if args else None
    if name in ("_make_dual", "_fw_primal") and isinstance(first, OnDevice):
        return OnDevice(first.host.view_as(first.host))  # forward mode is kept by the tensor outside
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
    _check_devices(func, name, args, tensors, ours)
    target = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    goes = bool(ours) if target is None else target.type == NAME
    if name == "copy_":
        goes = isinstance(first, OnDevice)
    if name in MOVING and isinstance(args[1] if name == "copy_" else first, OnDevice) != goes:
        waits.note("to_device" if goes else "to_host")
    if ours and (name in WAITING or (name == "index" and _has_mask(args[1]))):
        waits.note(name)
    args, kwargs = tree_map(_host, args), tree_map(_host, kwargs)
    if target is not None:
        kwargs["device"] = torch.device("cpu")
    # A symbolic zero has no memory, and the CPU's kernels would look for it.
    found = torch.zeros(*args, **kwargs) if name == "_efficientzerotensor" else func(*args, **kwargs)
    if not goes:
        return found
    known = {id(tensor.host): tensor for tensor in ours}  # in-place operations return what they were given
    return tree_map(lambda leaf: known[id(leaf)] if id(leaf) in known else _on_device(leaf), found)


def _check_devices(func: Any, name: str, args: Any, tensors: list[Tensor], ours: list[Tensor]) -> None:
    """As on CUDA: scalars of the CPU, and indices of the CPU, may meet tensors of the device."""
    if not ours or name in MOVING:
        return
    allowed = [*args[1]] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else []
    strangers = [
        tensor
        for tensor in tensors
        if not isinstance(tensor, OnDevice) and tensor.dim() and not any(tensor is index for index in allowed)
    ]
    if strangers:
        shapes = [(tensor.device.type, tuple(tensor.shape)) for tensor in tensors]
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, but they are {shapes}")


def _has_mask(indices: Any) -> bool:
    return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices)


def _host(leaf: Any) -> Any:
    return leaf.host if isinstance(leaf, OnDevice) else leaf


def _on_device(leaf: Any) -> Any:
    return OnDevice(leaf) if isinstance(leaf, Tensor) and not isinstance(leaf, OnDevice) else leaf


class _Everything(TorchDispatchMode):
    """Factories (`torch.zeros(device=…)`) have no tensor of ours among their arguments: a mode sees them too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


@contextmanager
def standin() -> Iterator[Waits]:
    """Inside, the device exists; yields its count of waits, which begins at zero."""
    waits.places.clear()
    torch.__future__.set_swap_module_params_on_conversion(True)  # else `.to` would untie tied weights
    try:
        # The engine's threads for devices want streams, which a device in Python has not.
        with _Everything(), torch.autograd.set_multithreading_enabled(False):
            yield waits
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


# `torch.tensor(…, device=…)` makes its tensor below every mode.
_library = torch.library.Library("aten", "IMPL")


def _empty(size: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return OnDevice(torch.empty(size, dtype=dtype, device="cpu"))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return OnDevice(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    waits.note("to_device" if isinstance(target, OnDevice) else "to_host")
    _host(target).copy_(_host(source))
    return target


_library.impl("empty.memory_format", _empty, "PrivateUse1")
_library.impl("empty_strided", _empty_strided, "PrivateUse1")
_library.impl("_copy_from", _copy_from, "PrivateUse1")
