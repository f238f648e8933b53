"""Notices that a worker of the job has died, whatever the driver is waiting for at that moment.

verl itself notices where it calls the worker. But a dead reward worker or rollout replica only makes responses
fail, and verl's replay buffer then trains on what is left. So every worker has one call outstanding that the
dead cannot answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError

INTERVAL_SECONDS = 0.2


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
