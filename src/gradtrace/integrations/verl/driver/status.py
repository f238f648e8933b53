"""What a run on verl is doing, in a file beside it: the launcher reads there who died, and in which phase."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gradtrace.trace.atomic import atomic_write

FILE = "verl_status.json"


@dataclass
class Status:
    step: int = 0
    phase: str = "start"
    """start, validate, rollout, log_prob, select, update, save, sync"""
    dead_worker: str = ""
    """Set by the watch when a worker has died."""
    error: str = ""
    workers: dict[str, int] = field(default_factory=dict)
    """Name → process id on its node."""

    def write(self, run_dir: Path) -> None:
        atomic_write(run_dir / FILE, json.dumps(asdict(self)).encode())


def read_status(run_dir: Path) -> Status:
    """An empty one, if the run never came that far."""
    path = run_dir / FILE
    return Status(**json.loads(path.read_text())) if path.is_file() else Status()


def describe(status: Status) -> str:
    """One line for the user: who, where, when."""
    # Rewards are computed while responses still come in: it is the worker that tells which of the two it was.
    phase = "reward" if status.dead_worker.startswith("reward") else status.phase
    who = status.dead_worker or "the driver (or all of Ray)"
    process = status.workers.get(status.dead_worker)
    where = f" (process {process})" if process else ""
    what = "failed" if status.error and not status.dead_worker else "died"
    why = f": {status.error}" if status.error and not status.dead_worker else ""
    return f"{who}{where} {what} in phase {phase} of step {status.step}{why}"
