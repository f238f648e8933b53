"""The influence trace of a run on disk: from the scores of a step to its file and its metrics."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.instruments.columns import Truth, no_truth
from gradtrace.instruments.influence.capture import Scored
from gradtrace.instruments.influence.columns import describe, influence_columns
from gradtrace.instruments.influence.empty import why_empty
from gradtrace.instruments.influence.plan import StepPlan
from gradtrace.trace.schema import GroupStatus
from gradtrace.trace.writer import TraceWriter

logger = logging.getLogger(__name__)

LARGEST = ("debug_modules", "debug_modules_fired")
"""Metrics that every mini-batch has alike."""
MEANS = ("effective_dof", "label_r2")
"""Metrics that are averaged over the mini-batches of a step; the others are added up."""


class InfluenceRecord:
    def __init__(
        self,
        config: Any,
        writer: TraceWriter,
        meta: dict[str, Any] | None = None,
        truth: Truth = no_truth,
        report: Callable[[str], None] = logger.warning,
    ) -> None:
        """`config` is an `InfluenceTraceConfig`; `meta` goes into every file beside the meaning of the scores."""
        self.config = config
        self.writer = writer
        self.meta = (meta or {}) | describe(config)
        self.truth = truth
        self.report = report
        self.told: set[str] = set()
        """Causes of empty traces, and the tracer's remarks, that were reported: each is said once in a run."""
        self.errors = 0
        """Steps that could not be traced."""

    def say_scope(self, prompts: int, mini_batch: int) -> None:
        """Say once what `all_selected` compares, where a step of `prompts` has several mini-batches."""
        config = self.config
        if (
            config.accepted_rejected_scope == "all_selected"
            and not config.scope_pass
            and 0 < mini_batch < prompts
        ):
            self.report(
                f"influence trace: accepted_rejected_scope=all_selected compares the responses of one mini-batch "
                f"({mini_batch} of the step's {prompts} prompts), each at the weights it meets; scope_pass=true "
                "compares the whole step at its first weights (embedded loop)."
            )

    def plan(self, batch: RolloutBatch, step: int) -> StepPlan:
        """Which groups of this step are to be scored, and who was accepted."""
        config = self.config
        return StepPlan.of(batch, step, config.max_prompts_per_step, config.accepted_threshold)

    def write(self, batch: RolloutBatch, scored: list[Scored], status: Tensor, step: int) -> dict[str, float]:
        """Write the step's file; returns its metrics."""
        columns, meta = influence_columns(
            batch, scored, status, self.config, self.config.pairwise_max_mb, self.truth
        )
        if not len(columns["group"]):
            cause, sentence = why_empty(batch, torch.as_tensor(columns["group_status"]))
            meta["empty"] = sentence
            self.tell_once(cause, f"step {step} has no rows: {sentence}.")
        for warning in (warning for part in scored for warning in part.trace.warnings):
            self.tell_once(
                re.split(r"\d", warning)[0], f"step {step}: {warning}"
            )  # once, whatever its numbers
        self.writer.write(step, columns, self.meta | meta)
        return self.metrics(status, scored, columns)

    def tell_once(self, about: str, sentence: str) -> None:
        if about not in self.told:
            self.told.add(about)
            self.report(f"influence trace: {sentence}")

    def failed(self, reason: object, status: Tensor, step: int) -> dict[str, float]:
        """A failing trace is shown and counted, and costs this step's trace; it does not cost the run."""
        self.errors += 1
        self.report(f"influence trace: step {step} is not traced: {reason}")
        return self.metrics(status, [], {})

    def metrics(self, status: Tensor, scored: list[Scored], columns: dict[str, Any]) -> dict[str, float]:
        """Counts of the whole step under the names of the logs, and what the tracer counted in its mini-batches."""
        metrics: dict[str, float] = {}
        for part in scored:
            for name, value in part.trace.metrics.items():
                known, short = metrics.get(name, 0.0), name.removeprefix("influence_trace/")
                value = value / len(scored) if short in MEANS else value
                metrics[name] = max(known, value) if short in LARGEST else known + value
        constant = int((status == int(GroupStatus.CONSTANT_REWARD)).sum())
        counts = {
            "uid_total": len(status),
            "uid_constant": constant,
            "uid_mixed": len(status) - constant,
            "selected_responses": len(columns.get("group", ())),
            "selected_prompts": len(set(columns["group"].tolist())) if columns else 0,
            "rows_emitted": len(columns.get("group", ())),
            "tokens_emitted": int(columns["captured"].sum()) if columns else 0,
            "debug_groups_over_cap": int((status == int(GroupStatus.OVER_PROMPT_CAP)).sum()),
            "debug_errors": self.errors,
            "debug_write_errors": self.writer.stats.failed,
        }
        return metrics | {f"influence_trace/{name}": float(value) for name, value in counts.items()}
