"""The probes of a run on disk: from what was found about a step to its file and its metrics, in every host."""

from __future__ import annotations

from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.instruments.entropy_probe.columns import Probed
from gradtrace.instruments.record import TraceRecord


class ProbeRecord(TraceRecord):
    """`config` is an `EntropyProbeConfig`."""

    label = "entropy probe"

    def is_due(self, step: int) -> bool:
        return bool(step % self.config.every == 0)

    def failed(self, step: int, why: Exception | str) -> None:
        """A failing probe is shown and counted, and costs this step's probe; not the run, unless `on_error=raise`."""
        message = f"entropy probe: step {step} is not probed: {why}"
        if self.config.on_error == "raise":
            raise why if isinstance(why, Exception) else GradtraceError(message)
        self.errors += 1
        self.report(message)

    def write(self, batch: RolloutBatch, step: int, probed: Probed | None, seconds: float) -> dict[str, float]:
        """Write the file of a step that is due; None: it failed. Returns metrics."""
        try:
            if probed is not None:
                self.writer.write(step, probed.columns(batch), self.meta | probed.meta(batch))
        except Exception as error:
            self.failed(step, error)
            probed = None
        metrics = {"entropy_probe/errors": float(self.errors)}
        if probed is None:
            return metrics
        return {
            **metrics,
            **probed.metrics(),
            "entropy_probe/write_errors": float(self.writer.stats.failed),
            "timing_s/entropy_probe": seconds,
        }
