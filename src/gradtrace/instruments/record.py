"""An instrument's trace of a run on disk, the same in every host."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gradtrace.instruments.columns import Truth, no_truth
from gradtrace.trace.writer import TraceWriter

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class TraceRecord:
    """Its files, what every one of them says, and what could not be traced. Subclasses say what a file holds."""

    label: ClassVar[str]
    """The instrument in messages."""
    config: Any
    """Its section of the configuration."""
    writer: TraceWriter
    meta: dict[str, Any] = field(default_factory=dict)
    """Goes into every file."""
    truth: Truth = no_truth
    report: Callable[[str], None] = logger.warning
    errors: int = field(default=0, init=False)
    """Steps that could not be traced."""
    _told: set[str] = field(default_factory=set, init=False)

    def tell_once(self, about: str, sentence: str) -> None:
        """Report a sentence, unless one `about` the same was reported in this run."""
        if about not in self._told:
            self._told.add(about)
            self.report(f"{self.label}: {sentence}")
