"""Memory that a training step frees stays with the process, for the next step."""

from __future__ import annotations

import ctypes
import os
import sys

LARGEST_KEPT = 32 * 2**20
"""Blocks up to this size come out of the heap; glibc takes no larger limit. Others return to the system when freed."""
MOST_KEPT = 512 * 2**20
"""The heap gives back what is free at its end beyond this."""
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1


def keep_freed_memory() -> bool:
    """Whether glibc's malloc was told to keep it; not where the user has settings of their own, or there is no glibc.

    Otherwise it gives memory back whenever much of it is free at the end of the heap, and the next step has every page
    of it zeroed again: ten thousand pages in a step of the demo.
    """
    chosen = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if chosen or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGEST_KEPT)) and bool(mallopt(_TRIM_THRESHOLD, MOST_KEPT))
