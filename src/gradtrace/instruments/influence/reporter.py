"""The influence trace beside the files: which groups are scored, the file and the metrics of a step, and why a step has
no rows, in words."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.instruments.contract import Reporter, Table, TrainingRun
from gradtrace.instruments.influence.columns import parts_columns, parts_metrics
from gradtrace.instruments.influence.factor_columns import describe, influence_columns
from gradtrace.instruments.influence.plan import (
    StepPlan,
    groups_to_measure,
    status_by_advantage,
    status_by_contrast,
)
from gradtrace.instruments.record import Record
from gradtrace.trace.columns import GroupStatus


class InfluenceReporter(Reporter):
    def __init__(self, record: Record, run: TrainingRun | None = None) -> None:
        self.record = record
        self.config = record.settings
        self.run = run
        self._plan: StepPlan | None = None
        size, config = run.step_size if run is not None else None, self.config
        by_mini_batch = config.scope == "all_selected" and not (config.is_parts or config.scope_pass)
        if size is not None and by_mini_batch and 0 < size.mini_batch < size.prompts:
            record.report(
                "influence trace: accepted_rejected_scope=all_selected compares the responses of one mini-batch "
                f"({size.mini_batch} of the step's {size.prompts} prompts), each at the weights it meets; "
                "scope_pass=true compares the whole step at its first weights (embedded loop)."
            )

    def is_due(self, step: int) -> bool:
        return bool(step % self.config.write_every == 0)

    def needs_entropies(self, step: int) -> bool:
        return self.is_due(step)

    def plan(
        self, batch: RolloutBatch, step: int, sampled: RolloutBatch | None = None
    ) -> tuple[RolloutBatch, StepPlan | None]:
        """Which groups of this step are to be scored, and who was accepted."""
        self._plan = None
        if self.is_due(step):
            every, threshold = self.config.verify_every, self.config.accepted_threshold
            verify = bool(every) and step % every == 0
            if self.config.is_parts:
                status = status_by_advantage(batch)
                groups = self._groups(batch, status, step)
                self._plan = StepPlan.of(batch, step, status, threshold, verify, **groups)
            else:
                status = status_by_contrast(batch, self.config.max_prompts_per_step, threshold)
                self._leave_out_split_groups(status, step)
                self._plan = StepPlan.of(batch, step, status, threshold, verify)
        return batch, self._plan

    def _groups(self, batch: RolloutBatch, status: Tensor, step: int) -> dict[str, Tensor]:
        """The groups that are measured, and those that are also scored on their own prompt."""
        whole = status.clone()
        whole[self._split_groups()] = int(GroupStatus.NOT_CAPTURED)
        turn = step // self.config.write_every
        measured = groups_to_measure(batch, whole, turn, str(self.config.measure), self.config.pairwise)
        if self.config.scope != "per_prompt":
            return {"measured": measured, "own": measured}
        return {"measured": measured, "own": (whole == int(GroupStatus.SCORED)).nonzero().squeeze(-1)}

    def _split_groups(self) -> Tensor:
        """Groups of the step under way that several optimizer steps train on: no gradient is of a whole one."""
        return torch.tensor(self.run.split_groups if self.run is not None else (), dtype=torch.long)

    def _leave_out_split_groups(self, status: Tensor, step: int) -> None:
        split = self._split_groups()
        if not len(split):
            return
        self.record.report(
            f"influence trace: {len(split)} groups of step {step} have no scores: the host's batch has holes or "
            "padding, so that they do not lie in one mini-batch"
        )
        status[split[status[split] == int(GroupStatus.SCORED)]] = int(GroupStatus.NOT_CAPTURED)

    def write(self, batch: RolloutBatch, step: int, table: Table | None) -> dict[str, float]:
        plan, self._plan = self._plan, None
        if plan is None:
            return {}
        if table is None or table.failure:
            self.record.failed(step, table.failure if table is not None else "no process has observed it")
            return self._metrics(plan.status, {}, {})
        config, found = self.config, dict[str, float]()
        if config.is_parts:
            rows, columns, meta = parts_columns(
                batch, table, plan.status, config.accepted_threshold, config.pairwise_max_mb
            )
            found = parts_metrics(batch, table) | {"timing_s/influence_score": table.seconds}
        else:
            rows, columns, meta = influence_columns(batch, table, plan.status, config, config.pairwise_max_mb)
            found, meta = table.facts["metrics"], describe(config) | meta
        status = torch.as_tensor(columns["group_status"])
        if not len(rows):
            cause, sentence = why_empty(batch, status)
            meta["empty"] = sentence
            self.record.say_once(cause, f"step {step} has no rows: {sentence}.")
        if table.facts.get("refused"):
            self.record.say_once("refused", f"no group is measured: {table.facts['refused']}.")
        for warning in table.facts.get("warnings", ()):
            # Once, whatever its numbers are.
            self.record.say_once(re.split(r"\d", warning)[0], f"step {step}: {warning}")
        if table.facts.get("unverified"):
            self.record.say_once("verify_every", f"step {step} is not verified: {table.facts['unverified']}")
        self.record.write(step, batch, rows, columns, meta)
        counts = {"rows": rows, "groups": batch.group[rows].unique(), "captured": columns["captured"]}
        return self._metrics(plan.status, found, counts) | table.facts.get("validity", {})

    def _metrics(self, status: Tensor, found: dict[str, float], counted: dict[str, Any]) -> dict[str, float]:
        """Counts of the whole step under the names of the logs, and what the tracers counted."""
        constant = int((status == int(GroupStatus.CONSTANT_REWARD)).sum())
        counts = {
            "uid_total": len(status),
            "uid_constant": constant,
            "uid_mixed": len(status) - constant,
            "selected_responses": len(counted.get("rows", ())),
            "selected_prompts": len(counted.get("groups", ())),
            "rows_emitted": len(counted.get("rows", ())),
            "tokens_emitted": int(counted["captured"].sum()) if counted else 0,
            "debug_groups_over_cap": int((status == int(GroupStatus.OVER_PROMPT_CAP)).sum()),
            "debug_errors": self.record.errors,
            "debug_write_errors": self.record.write_errors,
        }
        return found | {f"influence_trace/{name}": float(value) for name, value in counts.items()}


def why_empty(batch: RolloutBatch, status: Tensor) -> tuple[str, str]:
    """The cause of a trace without rows (a name to count it by) and a sentence about it, with what to do."""
    if bool((status == int(GroupStatus.NON_FINITE)).any()):
        return "non_finite", (
            "the gradients were not finite, so that the optimizer made no step either: lower actor.optim.lr, and look "
            "at the rewards and advantages of this step"
        )
    if bool((status == int(GroupStatus.NOT_CAPTURED)).any()):
        return "not_captured", (
            "no process has scored the groups that are trained on. For scores from captured factors, `gradtrace doctor"
            " --model` shows which layers can be traced, and debug_backward_captures how often they fired"
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
