"""The few collectives that attribution needs. Without a process group each is a no-op."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class Ranks:
    """All ranks that share a batch. They call `score()` together, and every method here is collective."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.bytes_moved = 0

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
