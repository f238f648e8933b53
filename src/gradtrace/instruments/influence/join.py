"""One influence trace from those of several ranks, of which each has the scores of the responses that it trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradtrace.attribution import InfluenceTrace
from gradtrace.attribution.collectives import Ranks
from gradtrace.instruments.influence.capture import Scored

Entry = dict[str, Tensor]
"""What a rank has of one response, in float32: `position`, `terms`, `likelier` [T_r or 0], `rest` []; `pairs` [t, m]
with the `members` long[m] (rows of the batch) that they are with; `optimizer_step` long[]."""
REASONS = ("not_captured", "non_finite")
"""Why a group has no scores on any rank; that another rank has them is no reason."""
LARGEST = (
    "timing_s/",
    "influence_trace/debug_modules",
    "influence_trace/debug_responses_captured",
    "influence_trace/loss_term_prompts",
    "influence_trace/uid_",
)
"""Metrics that are the same on all ranks, or run side by side: the largest counts."""
MEANS = ("influence_trace/effective_dof", "influence_trace/label_r2")
"""Metrics that are averaged. The others are added up."""


@dataclass(eq=False)
class RankScores:
    """What one rank has of a mini-batch, as plain data that can travel."""

    entries: dict[int, Entry] = field(default_factory=dict)
    """Row → the scores of a response that it trained on."""
    skipped: dict[int, str] = field(default_factory=dict)
    """Groups that have no scores on any rank."""
    warnings: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    credit: str = ""

    @staticmethod
    def of(part: Scored) -> RankScores:
        trace = part.trace
        return RankScores(
            {int(row): _entry(part, local) for local, row in enumerate(part.rows) if len(trace.position_scores[local])},
            {group: reason for group, reason in trace.skipped.items() if reason in REASONS},
            trace.warnings,
            trace.metrics,
            trace.meta,
            trace.credit,
        )


def _entry(part: Scored, local: int) -> Entry:
    trace = part.trace
    members, pairs = trace.pairwise_of(local)
    scores = {
        "position": trace.position_scores[local],
        "terms": trace.loss_term_scores[local] if trace.loss_term_scores else torch.empty(0),
        "likelier": trace.likelier_scores[local] if trace.likelier_scores else torch.empty(0),
        "rest": trace.rest_scores[local],
        "pairs": pairs,
    }
    return {name: values.detach().float().cpu() for name, values in scores.items()} | {
        "members": part.rows[torch.tensor(members, dtype=torch.long)],
        "optimizer_step": part.optimizer_step[local],
    }


def joined_over(ranks: Ranks, part: Scored) -> Scored:
    """The same on every rank: the scores of the mini-batch's responses from whoever has them. Collective."""
    if ranks.size == 1:
        return part
    return joined(part.rows, ranks.gather(RankScores.of(part)), config=part.trace.config)


def joined(rows: Tensor, of_ranks: Sequence[RankScores], **shared: Any) -> Scored:
    """The scores of a mini-batch's `rows` as a single rank would have made them."""
    local_of = {row: local for local, row in enumerate(rows.tolist())}
    lists = {name: [torch.empty(0) for _ in local_of] for name in ("position", "terms", "likelier")}
    rest, steps = torch.zeros(len(local_of)), torch.zeros(len(local_of), dtype=torch.long)
    pairwise: dict[int, tuple[list[int], Tensor]] = {}
    whole = RankScores()
    for part in of_ranks:
        whole.skipped |= part.skipped
        whole.warnings += [warning for warning in part.warnings if warning not in whole.warnings]
        whole.meta |= part.meta
        whole.credit = whole.credit or part.credit
        for row, entry in part.entries.items():
            local = local_of[row]
            for name, values in lists.items():
                values[local] = entry[name]
            rest[local], steps[local] = entry["rest"], entry["optimizer_step"]
            if len(entry["members"]):
                pairwise[local] = [local_of[row] for row in entry["members"].tolist()], entry["pairs"]
    terms, likelier = (lists[name] if any(len(own) for own in lists[name]) else None for name in ("terms", "likelier"))
    trace = InfluenceTrace(
        position_scores=lists["position"],
        loss_term_scores=terms,
        likelier_scores=likelier,
        rest_scores=rest,
        response_kernel=torch.empty(0, 0),
        skipped=whole.skipped,
        metrics=combined([part.metrics for part in of_ranks], LARGEST),
        meta=whole.meta,
        warnings=whole.warnings,
        credit=whole.credit,
        _pairwise=pairwise,
        **shared,
    )
    return Scored(rows, steps, trace)


def combined(of_parts: Sequence[dict[str, float]], largest: tuple[str, ...]) -> dict[str, float]:
    """The numbers of a whole from those that each of its parts has: of names that begin like `largest` the largest,
    `MEANS` averaged over the parts that have them, the others added up."""
    total: dict[str, float] = {}
    for name in dict.fromkeys(name for own in of_parts for name in own):
        values = [own[name] for own in of_parts if name in own]
        if name.startswith(largest):
            total[name] = max(values)
        else:
            total[name] = sum(values) / (len(values) if name in MEANS else 1)
    return total
