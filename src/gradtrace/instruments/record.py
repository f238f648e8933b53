"""One instrument's files of one run, the same in every host."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gradtrace.attribution import AttributionError
from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.instruments.columns import Truth, group_columns, no_truth, response_columns
from gradtrace.trace.columns import InstrumentRecord
from gradtrace.trace.writer import TraceWriter

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Record:
    about: InstrumentRecord | None
    """None: the instrument writes no files."""
    settings: Any
    """The instrument's section of the configuration."""
    writer: TraceWriter | None = None
    """None: another process writes."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Goes into every file."""
    truth: Truth = no_truth
    report: Callable[[str], None] = logger.warning
    label: str = ""
    """The instrument in messages."""
    errors: int = field(default=0, init=False)
    """Steps that could not be traced."""
    _said: set[str] = field(default_factory=set, init=False)

    def write(
        self, step: int, batch: RolloutBatch, rows: Tensor, columns: dict[str, Any], meta: dict[str, Any]
    ) -> None:
        """Write the file of a step: the responses `rows` of the batch with their groups, prompts, tokens and turns, and
        the instrument's own `columns`."""
        if self.writer is None or self.about is None:
            return
        known = {**group_columns(batch, self.truth), **response_columns(batch, rows, self.truth)}
        allowed = self.about.columns
        self.writer.write(step, {name: v for name, v in known.items() if name in allowed} | columns, self.meta | meta)

    @property
    def write_errors(self) -> float:
        """Steps whose file could not be written."""
        return float(self.writer.stats.failed) if self.writer is not None else 0.0

    def say_once(self, about: str, sentence: str) -> None:
        """Report a sentence, unless one `about` the same was reported in this run."""
        if about not in self._said:
            self._said.add(about)
            self.report(f"{self.label}: {sentence}")

    def failed(self, step: int, why: Exception | str) -> None:
        """Count a step that was not traced, and tell; with `on_error=raise`, end the run."""
        sentence = f"{self.label}: step {step} is not traced: {why}"
        if getattr(self.settings, "on_error", "warn") == "raise":
            if isinstance(why, Exception) and not isinstance(why, (GradtraceError, AttributionError)):
                raise why
            raise GradtraceError(sentence)
        self.errors += 1
        self.report(sentence)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
