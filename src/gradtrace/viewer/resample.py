"""Resample from here: the one job that a viewer started with `--resample` may run.

The viewer itself loads no model; what samples is given to it by the command (`Sampling`)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gradtrace.errors import GradtraceError

logger = logging.getLogger(__name__)

MOST_K = 512
MOST_TOKENS = 1 << 19
"""Continuations times their longest length in one job."""


class CancelledError(Exception):
    """The visitor does not want the rest."""


Progress = Callable[[int, int], None]
"""Told how many continuations are done, of how many."""


@dataclass(frozen=True)
class Request:
    """k continuations from before and from after a token."""

    run: Path
    step: int
    group: int
    response: int
    position: int
    k: int


class Sampling(Protocol):
    """Loads a run's checkpoint and draws continuations; the viewer only asks for them and shows how far they are."""

    def runs(self) -> list[Path]:
        """The runs that it may sample from: those that the command named."""

    def resample(self, request: Request, most_tokens: int, progress: Progress) -> None:
        """Sample and store; `progress` may raise `CancelledError`, which is passed on."""


class ResampleJob:
    """At most one job at a time; its state is what visitors ask for."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._lock = threading.Lock()
        self._cancel = threading.Event()
        self._thread: threading.Thread | None = None
        self._state: dict[str, Any] = {"state": "idle"}

    def state(self) -> dict[str, Any]:
        with self._lock:
            return dict(self._state)

    def start(self, request: Request, run_id: int) -> str:
        """Begin a job; the reason why not, or an empty text."""
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return "another job is running: wait for it, or cancel it"
            self._cancel.clear()
            where = {name: getattr(request, name) for name in ("step", "group", "response", "position", "k")}
            self._state = {"state": "running", "done": 0, "total": 0, "run": run_id, **where}
            self._thread = threading.Thread(target=self._work, args=(request,), name="gradtrace-resample", daemon=True)
            self._thread.start()
        return ""

    def cancel(self) -> None:
        self._cancel.set()

    def _work(self, request: Request) -> None:
        try:
            self.sampling.resample(request, MOST_TOKENS, self._progress)
            self._set(state="done")
        except CancelledError:
            self._set(state="cancelled")
        except GradtraceError as error:
            self._set(state="failed", error=str(error))
        except Exception as error:  # the page must not wait for ever
            logger.exception("resampling failed")
            self._set(state="failed", error=f"{type(error).__name__}: {error}")

    def _progress(self, done: int, total: int) -> None:
        if self._cancel.is_set():
            raise CancelledError
        self._set(done=done, total=total)

    def _set(self, **changes: Any) -> None:
        with self._lock:
            self._state |= changes
