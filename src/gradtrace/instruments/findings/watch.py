"""Runs the detectors after every step, in every host: one call with the batch and the metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradtrace.batch import RolloutBatch
from gradtrace.instruments.blame.reporter import BlameReporter, StepBlame
from gradtrace.instruments.findings import FindingsConfig, reward, text, training
from gradtrace.instruments.findings.base import Finding, Moment
from gradtrace.instruments.findings.reward import AcceptedGradients
from gradtrace.instruments.findings.text import batch_statistics
from gradtrace.instruments.steps import Reporters
from gradtrace.trace.files import JsonLines
from gradtrace.trace.reader import FINDINGS, read_run

logger = logging.getLogger(__name__)

Detector = Callable[[Moment], Finding | None]
DETECTORS: dict[str, Detector] = {
    "gradient_spike": training.gradient_spike,
    "entropy": training.entropy,
    "length_drift": text.length_drift,
    "reward_parts": reward.reward_parts,
    "constant_groups": reward.constant_groups,
    "repetition": text.repetition,
    "kl_runaway": training.kl_runaway,
    "dominating_prompt": training.dominating_prompt,
    "clip_saturation": training.clip_saturation,
    "mismatch": training.mismatch,
    "validation_falls": reward.validation_falls,
    "reward_jump": reward.reward_jump,
    "end_token": text.end_token,
    "influence_gap": training.influence_gap,
    "likelihood_displacement": training.likelihood_displacement,
    "critic_diverges": training.critic_diverges,
    "reward_hacking": reward.reward_hacking,
}


@dataclass(eq=False)
class Findings:
    """`see(step, batch, metrics)` after a step; what it returns belongs to the step's metrics."""

    knobs: FindingsConfig
    run_dir: Path
    decode: Callable[[list[int]], str]
    report: Callable[[str], None] = logger.warning
    blame: Callable[[], StepBlame | None] = lambda: None

    @staticmethod
    def of(steps: Reporters, run_dir: Path) -> Findings:
        """The detectors of a run, which read the blame of a step where the run has it."""

        def blame() -> StepBlame | None:
            reporter = steps.reporters.get("blame")
            return reporter.last if isinstance(reporter, BlameReporter) else None

        decode = steps.run.tokenizer.decode
        return Findings(steps.sections.findings, run_dir, lambda ids: str(decode(ids)), steps.run.report, blame)

    def __post_init__(self) -> None:
        self.gradients = AcceptedGradients()
        self.history: list[Mapping[str, float]] = []
        self._last_seen: dict[str, int] = {}
        """Detector → the last step in which it found something, told or not."""
        self._counts: dict[str, int] = {}
        self._broken: set[str] = set()
        self._file: JsonLines | None = None

    def start(self, last_step: int) -> None:
        """The run begins, or goes on after `last_step`: what it said later is void."""
        if not self.knobs.enable:
            return
        self._file = JsonLines(self.run_dir / FINDINGS)
        self._file.keep(lambda record: int(record.get("step", 0)) <= last_step)
        run = read_run(self.run_dir)
        self.history = [row for row in run.metrics()[0] if int(row.get("step", 0)) <= last_step]
        for finding in run.findings():
            name = str(finding.get("detector"))
            self._counts[name] = self._counts.get(name, 0) + 1
        for row in self.history:
            for name in DETECTORS:
                if row.get(f"findings/{name}"):
                    self._last_seen[name] = int(row["step"])

    def remember(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Metrics without a batch, such as the validation before the first step."""
        self.history.append({"step": step, **metrics})

    def see(self, step: int, batch: RolloutBatch, metrics: Mapping[str, float]) -> dict[str, float]:
        if not self.knobs.enable or self._file is None:
            return {}
        blame = self.blame()
        try:
            own = batch_statistics(batch, blame)
            found_cluster = None if blame is None or not blame.updates else self.gradients.see(batch, blame)
            own |= {} if found_cluster is None else found_cluster.statistics()
        except Exception as error:
            self._fails("batch statistics", step, error)
            return {}
        everything = {**metrics, **own}
        moment = Moment(step, batch, everything, self.history, self.knobs, blame, self.decode, found_cluster)
        for name, detect in DETECTORS.items():
            if name in self.knobs.off:
                continue
            try:
                found = detect(moment)
            except Exception as error:
                self._fails(name, step, error)
                continue
            own[f"findings/{name}"] = float(found is not None)
            if found is not None:
                self._tell(replace(found, detector=name, step=step))
        own["findings/total"] = float(sum(self._counts.values()))
        self.history.append({"step": step, **metrics, **own})
        return own

    def _tell(self, finding: Finding) -> None:
        """In the terminal, run.log and findings.jsonl; once, and again only after it was gone for `quiet_steps`."""
        last = self._last_seen.get(finding.detector)
        self._last_seen[finding.detector] = finding.step
        if last is not None and finding.step - last <= self.knobs.quiet_steps:
            return
        self._counts[finding.detector] = self._counts.get(finding.detector, 0) + 1
        assert self._file is not None
        self._file.append(finding.as_json())
        self.report(
            f"finding, step {finding.step}, {finding.detector} ({finding.confidence:.0%} sure): {finding.sentence}"
        )

    def _fails(self, name: str, step: int, error: Exception) -> None:
        """A detector that fails is said once and costs the run nothing."""
        if name not in self._broken:
            self._broken.add(name)
            self.report(f"findings: {name} failed in step {step} and is not shown again: {error}")
