"""`RUN/run.log`: every warning and every message of an instrument, whatever the host shows or swallows."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAME = "run.log"


class RunLog(logging.Handler):
    """Takes warnings of this package's loggers and of Python, and what is told to it."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(logging.WARNING)
        self.path = run_dir / NAME
        self._is_closed = False
        self._show: Any = warnings.showwarning
        logging.getLogger("gradtrace").addHandler(self)
        warnings.showwarning = self._warned  # type: ignore[assignment]

    def emit(self, record: logging.LogRecord) -> None:
        self.tell(f"{record.levelname.lower()}: {record.getMessage()}")

    def tell(self, text: str) -> None:
        """A line with the time; a disk that is full costs the line and nothing else."""
        lines = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n"
        with contextlib.suppress(OSError), self.path.open("a", encoding="utf-8", errors="replace") as file:
            file.write(lines)

    def telling(self, report: Callable[[str], None]) -> Callable[[str], None]:
        """`report`, with every message in the log as well."""

        def both(text: str) -> None:
            self.tell(text)
            report(text)

        return both

    def close(self) -> None:
        self._is_closed = True
        logging.getLogger("gradtrace").removeHandler(self)
        if warnings.showwarning == self._warned:  # else another has come after us, and calls us
            warnings.showwarning = self._show
        super().close()

    def _warned(self, message: Any, category: Any, filename: str, lineno: int, *more: Any) -> None:
        if not self._is_closed:
            self.tell(f"{category.__name__}: {message} ({filename}:{lineno})")
        self._show(message, category, filename, lineno, *more)
