"""Peak memory of a piece of work in this process."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch

SAMPLE_SECONDS = 0.002
STATM = Path("/proc/self/statm")


def peak_bytes(work: Callable[[], object], device: torch.device) -> int | None:
    """The largest memory above that before `work`: allocated by torch on a GPU, resident set (sampled) on a CPU.
    None where the system does not tell."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if not STATM.exists():
        work()
        return None
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # memory that earlier work freed would hide what this one needs
    before = peak = resident_bytes()
    finished = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not finished.wait(SAMPLE_SECONDS):
            peak = max(peak, resident_bytes())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        work()
    finally:
        finished.set()
        watcher.join()
    return max(peak, resident_bytes()) - before


def resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * resource.getpagesize()
