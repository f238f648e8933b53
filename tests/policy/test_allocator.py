"""Freed memory stays with a training process, unless the user has settings of their own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from gradtrace.policy.cpu.norm import keep_freed_memory
import torch
kept = keep_freed_memory()
def work():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for part in [torch.ones(2**20) for _ in range(16)]:
        part.add_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
# The fewest of several turns: the system may take pages away in one of them, as a machine does that runs short of them.
print(kept, min(work() for _ in range(5)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
@pytest.mark.parametrize("given", [None, "131072"])
def test_freed_memory_is_found_again_unless_the_user_says_otherwise(given: str | None) -> None:
    kept_out = ("MALLOC_", "GLIBC_TUNABLES")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(kept_out)}
    if given is not None:
        environment |= {"MALLOC_TRIM_THRESHOLD_": given, "MALLOC_MMAP_THRESHOLD_": given}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    kept, faults = done.stdout.split()
    assert kept == str(given is None)
    assert (int(faults) < 1024) == (given is None), f"{faults} pages of 16,384 were fetched again"
