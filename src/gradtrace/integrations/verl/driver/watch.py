"""What a job on verl is doing, and whether its workers live; a file in the run says who died, and in which phase.

verl itself notices a dead worker where it calls it. But a dead reward worker or rollout replica only makes responses
fail, and verl's replay buffer then trains on what is left. So every worker has one call outstanding that the dead
cannot answer.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gradtrace.trace.files import atomic_write

FILE = "verl_status.json"
INTERVAL_SECONDS = 0.2


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


class Watch:
    def __init__(self, workers: dict[str, Any], on_death: Callable[[str, Exception], None]) -> None:
        """`workers`: name → Ray actor handle."""
        self.workers = workers
        self.on_death = on_death
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gradtrace-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def find_dead(self, timeout: float = 15.0) -> str:
        """A worker that is dead now; empty if all live. Those that are only busy count as living."""
        import ray
        from ray.exceptions import RayActorError

        asked = {handle.__ray_ready__.remote(): name for name, handle in self.workers.items()}
        end = time.monotonic() + timeout
        while asked and time.monotonic() < end:
            ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=1.0)
            for reference in ready:
                name = asked.pop(reference)
                try:
                    ray.get(reference)
                except RayActorError:
                    return name
        return ""

    def _run(self) -> None:
        import ray
        from ray.exceptions import RayActorError

        # A busy worker answers when it is free: one outstanding call each, asked again after it came back.
        asked = {handle.__ray_ready__.remote(): name for name, handle in self.workers.items()}
        while asked and not self._stop.wait(INTERVAL_SECONDS):
            ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0.05)
            for reference in ready:
                name = asked.pop(reference)
                try:
                    ray.get(reference)
                except RayActorError as error:
                    if not self._stop.is_set():
                        self.on_death(name, error)
                    return
                asked[self.workers[name].__ray_ready__.remote()] = name


def process_id(worker: Any) -> int:
    """Runs inside of the worker."""
    import os

    return os.getpid()
