"""Seconds of the timing of a capture, where they are asked for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor


class Timing:
    def __init__(self, enabled: bool) -> None:
        """Timing makes a GPU wait at the end of each phase, so it is off unless `profile_timing` asks for it."""
        self.enabled = enabled
        self.seconds: dict[str, float] = {}
        """timing_s/influence_NAME → seconds."""

    def __call__(self, name: str, tensor: Tensor) -> AbstractContextManager[None]:
        """Adds up the time of what happens inside; `tensor` says on which device."""
        return self._timed(name, tensor) if self.enabled else nullcontext()

    @contextmanager
    def _timed(self, name: str, tensor: Tensor) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        key = f"timing_s/influence_{name}"
        self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - started
