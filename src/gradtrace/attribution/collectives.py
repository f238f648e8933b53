"""The few collectives that attribution needs, and parts of sharded tensors. Without a process group all are no-ops."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from gradtrace.attribution.errors import AttributionError

T = TypeVar("T")


class Ranks:
    """All ranks that share a batch. They call `score()` together, and every method here is collective."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.bytes_moved = 0

    @property
    def place(self) -> int:
        """This rank's number among them."""
        return 0 if self.size == 1 else dist.get_rank(self.group)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place, the same bits on every rank."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
            self.bytes_moved += tensor.numel() * tensor.element_size()
        return tensor

    def gather(self, value: T) -> list[T]:
        """Small Python values of all ranks, in rank order."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values  # type: ignore[return-value]

    @contextmanager
    def together(self) -> Iterator[None]:
        """What fails on one rank inside fails on all of them, where the others would wait for it; nothing inside is
        collective, only the end."""
        if self.size == 1:
            yield
            return
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        said = self.gather(failure and str(failure))
        if failure is not None:
            raise failure
        for rank, reason in enumerate(said):
            if reason is not None:
                raise AttributionError(f"rank {rank}: {reason}")

    def copies(self, tensor: Tensor) -> int:
        """How many of these ranks hold the same part of a tensor: all of them if it is not sharded."""
        if not isinstance(tensor, DTensor):
            return self.size
        mesh = tensor.device_mesh
        parts = math.prod(mesh.size(dim) for dim, where in enumerate(tensor.placements) if isinstance(where, Shard))
        if self.size % parts:
            raise AttributionError(
                f"a tensor in {parts} shards cannot be summed over {self.size} ranks: take the process group of all"
                " ranks that hold a shard"
            )
        return self.size // parts

    def own_part(self, first: Tensor, second: Tensor) -> float:
        """This rank's part of ⟨first, second⟩: summed over the ranks, each element counts once. Not collective."""
        return float((local(first).double() * local(second).double()).sum()) / self.copies(first)

    def products(self, first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, float]:
        """⟨first, second⟩ of every name that both have, over the shards of all ranks; each element counts once."""
        names = [name for name in first if name in second]
        own = [self.own_part(first[name], second[name]) for name in names]
        totals = [math.fsum(column) for column in zip(*self.gather(own), strict=True)]
        return dict(zip(names, totals, strict=True))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, which is all of it if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_sharded(model: nn.Module) -> bool:
    """Whether its weights are in parts on several ranks."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def on_mesh(tensor: Tensor) -> Tensor:
    """A sharded tensor on the device that its ranks communicate by, where its parts are offloaded to another."""
    if not isinstance(tensor, DTensor) or tensor.to_local().device.type == tensor.device_mesh.device_type:
        return tensor
    part = tensor.to_local().to(tensor.device_mesh.device_type)
    return DTensor.from_local(part, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride())


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a tensor whose parts are on several ranks."""
    tensor = on_mesh(tensor)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def forget_gathered(model: nn.Module) -> None:
    """Drop the full weights that FSDP kept from its last pass: they are stale once a shard has changed."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
