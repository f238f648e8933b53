"""The influence trace of a run on disk: from the scores of a step to its file and its metrics, and why a step has no
rows, in words."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.instruments.influence.capture import Scored
from gradtrace.instruments.influence.columns import describe, influence_columns
from gradtrace.instruments.influence.join import combined
from gradtrace.instruments.influence.plan import StepPlan
from gradtrace.instruments.observer import TraceRecord
from gradtrace.trace.schema import INFLUENCE_TRACE, GroupStatus

LARGEST = ("influence_trace/debug_modules",)
"""Metrics that every mini-batch has alike."""


class InfluenceRecord(TraceRecord):
    """`config` is an `InfluenceTraceConfig`."""

    kind = INFLUENCE_TRACE
    label = "influence trace"

    def say_scope(self, prompts: int, mini_batch: int) -> None:
        """Say once what `all_selected` compares, where a step of `prompts` has several mini-batches."""
        config = self.config
        if config.accepted_rejected_scope == "all_selected" and not config.scope_pass and 0 < mini_batch < prompts:
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
        columns, meta = influence_columns(batch, scored, status, self.config, self.config.pairwise_max_mb, self.truth)
        if not len(columns["group"]):
            cause, sentence = why_empty(batch, torch.as_tensor(columns["group_status"]))
            meta["empty"] = sentence
            self.tell_once(cause, f"step {step} has no rows: {sentence}.")
        for warning in (warning for part in scored for warning in part.trace.warnings):
            # Once, whatever its numbers are.
            self.tell_once(re.split(r"\d", warning)[0], f"step {step}: {warning}")
        self.writer.write(step, columns, self.meta | describe(self.config) | meta)
        return self.metrics(status, scored, columns)

    def failed(self, reason: object, status: Tensor, step: int) -> dict[str, float]:
        """A failing trace is shown and counted, and costs this step's trace; it does not cost the run."""
        self.errors += 1
        self.report(f"influence trace: step {step} is not traced: {reason}")
        return self.metrics(status, [], {})

    def metrics(self, status: Tensor, scored: list[Scored], columns: dict[str, Any]) -> dict[str, float]:
        """Counts of the whole step under the names of the logs, and what the tracer counted in its mini-batches."""
        metrics = combined([part.trace.metrics for part in scored], LARGEST)
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


def why_empty(batch: RolloutBatch, status: Tensor) -> tuple[str, str]:
    """The cause of a trace without rows (a name to count it by) and a sentence about it, with what to do."""
    if bool((status == int(GroupStatus.NON_FINITE)).any()):
        return "non_finite", (
            "the gradients were not finite, so that the optimizer made no step either: lower actor.optim.lr, and look "
            "at the rewards and advantages of this step"
        )
    if bool((status == int(GroupStatus.NOT_CAPTURED)).any()):
        return "not_captured", (
            "the hooks saw none of the tokens of the groups with mixed rewards: `gradtrace doctor --model` shows which "
            "layers can be traced, and debug_backward_captures how often they fired"
        )
    return _no_contrast(batch)


def _no_contrast(batch: RolloutBatch) -> tuple[str, str]:
    """No group holds accepted and rejected responses: for which reason."""
    sizes = torch.bincount(batch.group)
    if int(sizes.max()) == 1:
        return (
            "one_response",
            "every prompt has one response, and there is nothing to compare it with: raise rollout.n",
        )
    if batch.kept is not None and not bool(batch.kept.all()):
        return "selection", (
            "selection left no group with accepted and rejected responses: keep more of the batch (trainer.tracin.…)"
        )
    if _all_siblings_equal(batch):
        return "no_diversity", (
            "all responses to a prompt are the same: raise rollout.temperature, or the policy has lost its entropy"
        )
    rewards = batch.need("rewards")
    low, high = float(rewards.min()), float(rewards.max())
    if low == high:
        cause, judged = "all_wrong", "wrong: the task is too hard for it"
        if high > 0:
            cause, judged = "all_right", "right: the task is too easy for this policy"
        return cause, (
            f"all {len(batch)} responses have the reward {high:g}, as if all were {judged}, or the reward is constant"
        )
    return "constant_groups", (
        f"in each of the {len(sizes)} groups all responses have the same reward (from {low:g} to {high:g} over the "
        "groups): prompts are too easy or too hard; raise rollout.n, or turn algorithm.dynamic_sampling.enable on"
    )


def _all_siblings_equal(batch: RolloutBatch) -> bool:
    texts = [tuple(response) for response in batch.response_ids]
    return len(set(zip(batch.group.tolist(), texts, strict=True))) == len(set(batch.group.tolist()))
