"""How long ranks wait for each other: `cluster.pg_timeout_seconds`, on the workers GRADTRACE_PG_TIMEOUT_SECONDS."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from gradtrace.errors import GradtraceError

VARIABLE = "GRADTRACE_PG_TIMEOUT_SECONDS"
VERLS = "VERL_PG_TIMEOUT_SECONDS"
"""The name that jobs of verl use; ours, and with it `cluster.pg_timeout_seconds`, counts before it."""
DEFAULT_SECONDS = 1800.0


def timeout_seconds() -> float:
    name = VARIABLE if os.environ.get(VARIABLE) else VERLS
    text = os.environ.get(name, "")
    if not text:
        return DEFAULT_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise GradtraceError(f"{name}={text}: a positive number of seconds is needed.")
    return seconds


def apply_timeout(groups: list[dist.ProcessGroup | None]) -> None:
    """Set the time-out of groups that exist already: verl makes them without asking for one. Nothing, if none is
    set."""
    if not os.environ.get(VARIABLE) and not os.environ.get(VERLS):
        return
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_seconds()), group)


class Meeting:
    """A barrier of all ranks that says who is missing, instead of hanging without a name. Made by all together."""

    def __init__(self) -> None:
        # Of gloo, where a barrier can name the rank that is missing.
        self.group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None

    def wait(self, what: str) -> None:
        """`what`: where and for what ranks meet, for the message."""
        if self.group is None:
            return
        timeout = timedelta(seconds=timeout_seconds())
        try:
            dist.monitored_barrier(self.group, timeout=timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise GradtraceError(
                f"{what}: not all ranks arrived within {timeout.total_seconds():g} s (cluster.pg_timeout_seconds): "
                f"{error}"
            ) from error
