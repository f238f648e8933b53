"""What a probe found: one JSON object, a trace that the viewer shows, and pictures."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from gradtrace.batch import RolloutBatch
from gradtrace.config_loader import to_yaml
from gradtrace.instruments.entropy_probe.columns import Probed
from gradtrace.instruments.entropy_probe.estimates import Measured, Tokens, fresh_change
from gradtrace.instruments.entropy_probe.probe import Prediction, Shares
from gradtrace.trace.atomic import atomic_write
from gradtrace.trace.run_files import RunFiles
from gradtrace.trace.schema import ENTROPY_PROBE
from gradtrace.trace.token_text import TokenBytes
from gradtrace.trace.writer import TraceWriter
from gradtrace.training.source import Source


@dataclass(frozen=True, eq=False)
class Fresh:
    """E's prompts sampled anew at the moved weights, with E's random numbers."""

    tokens: Tokens
    changed: int
    """Sequences that came out differently. With few of them the standard error is too small: it cannot know of the rare
    sequence that did not change this time."""


@dataclass(frozen=True, eq=False)
class ProbeResults:
    source: Source
    optimizer: str
    """Whose update it is: checkpoint, adamw or sgd."""
    step: int
    """Training steps behind the checkpoint."""
    rate: float
    """Learning rate of the update."""
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    task: str
    evaluation: RolloutBatch
    update: RolloutBatch
    prediction: Prediction
    shares: Shares
    after: dict[float, Tokens]
    """η in units of the learning rate → E at θ + η·Δθ."""
    fresh: dict[float, Fresh]
    """η → E sampled anew there; empty if it was not asked for."""
    clip_factor: float
    grad_norm: float
    seconds: dict[str, float]
    """How long each phase took, over all attempts."""

    def measured(self, eta: float) -> Measured:
        return self.prediction.against(self.after[eta], eta)

    @property
    def probed(self) -> Probed:
        """The update as it is, at η = 1."""
        rows = torch.arange(len(self.update))
        return Probed(rows, self.evaluation, self.prediction, self.shares, self.after[1.0], self.rate)

    def sweep(self) -> list[dict[str, float]]:
        """One row for each η, smallest first."""
        predicted = self.prediction.change
        rows = []
        for eta in sorted(self.after):
            measured = self.measured(eta)
            row = {
                "eta": eta,
                "predicted": eta * predicted.value,
                "predicted_stderr": eta * predicted.stderr,
                "predicted_half": eta * predicted.half,
                "measured": measured.change.value,
                "measured_stderr": measured.change.stderr,
                "measured_half": measured.change.half,
                "difference_stderr": measured.difference.stderr,
                "difference_half": measured.difference.half,
                "ess": measured.ess,
                "clipped_weights": measured.clipped,
            }
            if eta in self.fresh:
                fresh = fresh_change(self.prediction.base, self.fresh[eta].tokens)
                row |= {"fresh": fresh.value, "fresh_stderr": fresh.stderr, "fresh_half": fresh.half}
                row["fresh_changed"] = self.fresh[eta].changed
            rows.append(row)
        return rows

    def record(self) -> dict[str, Any]:
        """Everything but the numbers per token, for report.json. Entropy changes in nats per token of E."""
        p, s = self.prediction, self.shares
        sweep = self.sweep()
        return {
            "checkpoint": str(self.source.checkpoint),
            "step": self.step,
            "optimizer": self.optimizer,
            "learning_rate": self.rate,
            "grad_norm": self.grad_norm,
            "clip_factor": self.clip_factor,
            "evaluation": {
                "sequences": len(self.evaluation),
                "tokens": int(p.base.lengths.sum()),
                "mean_entropy": p.base.mean_entropy,
            },
            "update": {
                "responses": len(self.update),
                "tokens": int(self.update.response_mask.sum()),
                "mean_reward": float(self.update.need("rewards").mean()),
            },
            "predicted": dataclasses.asdict(p.change),
            "predicted_reward_to_go": dataclasses.asdict(p.reward_to_go),
            "predicted_score_function": dataclasses.asdict(p.score_function),
            "predicted_legacy": s.legacy,
            "covariance_estimate": self.probed.covariance(self.update),
            "shares": {
                "responses": s.responses.tolist(),
                "momentum": s.momentum,
                "decay": s.decay,
                "sum": float(s.responses.sum()) + s.momentum + s.decay,
            },
            "sweep": sweep,
            "log_log_slope": log_log_slope(sweep),
            "sign": "positive = entropy rises; shares: positive = raises entropy",
        }

    def write(self) -> Path:
        """report.json, report.html, pictures and the trace; returns the folder, which `gradtrace view` opens."""
        from gradtrace.probe.page import identity_picture, page, sweep_picture

        record = self.record()
        atomic_write(
            self.folder / "report.json",
            json.dumps({**record, "phase_seconds": self.seconds}, indent=2).encode(),
        )
        atomic_write(self.folder / "predicted_vs_measured.svg", identity_picture(record).encode())
        atomic_write(self.folder / "sweep.svg", sweep_picture(record).encode())
        atomic_write(self.folder / "report.html", page(record).encode())
        files = RunFiles(self.folder)
        files.write_config(to_yaml(dataclasses.replace(self.source.run, resume="")))
        files.write_token_bytes(TokenBytes.from_tokenizer(self.tokenizer))
        with TraceWriter(self.folder, ENTROPY_PROBE, on_error="raise") as writer:
            meta = self.probed.meta(self.update)
            if 1.0 in self.fresh:
                fresh = fresh_change(self.prediction.base, self.fresh[1.0].tokens)
                meta |= {"delta_h_fresh": fresh.value, "delta_h_fresh_stderr": fresh.stderr}
            meta |= {"eta_sweep": record["sweep"], "task": self.task}
            # the step that would come next
            writer.write(self.step + 1, self.probed.columns(self.update), meta)
        return self.folder


def log_log_slope(sweep: list[dict[str, float]]) -> float | None:
    """The slope of log |measured| over log η by least squares, over η ≤ 0.1·lr where that leaves two: 1 = proportional
    to the step. None where the measured change is 0."""
    rows = [row for row in sweep if row["eta"] <= 0.1]
    rows = rows if len(rows) > 1 else sweep
    if len(rows) < 2 or any(row["measured"] == 0 for row in rows):
        return None
    pairs = [(math.log(row["eta"]), math.log(abs(row["measured"]))) for row in rows]
    return statistics.linear_regression(*zip(*pairs, strict=True)).slope
