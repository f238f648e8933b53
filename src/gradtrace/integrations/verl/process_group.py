"""How long ranks wait for each other: `cluster.pg_timeout_seconds`, on the workers GRADTRACE_PG_TIMEOUT_SECONDS."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from gradtrace.errors import GradtraceError

VARIABLE = "GRADTRACE_PG_TIMEOUT_SECONDS"
DEFAULT_SECONDS = 1800.0


def timeout_seconds() -> float:
    text = os.environ.get(VARIABLE, "")
    if not text:
        return DEFAULT_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise GradtraceError(f"{VARIABLE}={text}: a positive number of seconds is needed.")
    return seconds


def apply_timeout(groups: list[dist.ProcessGroup | None]) -> None:
    """To groups that exist already: verl makes them without asking for a time-out. Nothing, if none is set."""
    if not os.environ.get(VARIABLE):
        return
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_seconds()), group)
