"""One influence trace from those of several ranks, of which each has the scores of the responses that it trained on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradtrace.attribution import InfluenceTrace
from gradtrace.attribution.collectives import Ranks
from gradtrace.instruments.influence.capture import Scored

Entry = dict[str, Any]
"""What a rank has of one response: `position`, `terms`, `likelier` and `pairs` (flat) in float32, the `members` (rows
of the batch) that the pairs are with, `rest` and `optimizer_step`."""
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
"""Metrics that are averaged over the ranks that have them. The others are added up."""


def own_entries(part: Scored) -> dict[int, Entry]:
    """Row → the scores of a response that this rank trained on."""
    return {
        int(row): _entry(part, local)
        for local, row in enumerate(part.rows)
        if len(part.trace.position_scores[local])
    }


def _entry(part: Scored, local: int) -> Entry:
    trace = part.trace
    members, block = trace.pairwise_of(local)
    terms, likelier = (
        _numpy(scores[local]) if scores else np.empty(0, np.float32)
        for scores in (trace.loss_term_scores, trace.likelier_scores)
    )
    return {
        "position": _numpy(trace.position_scores[local]),
        "terms": terms,
        "likelier": likelier,
        "members": part.rows[torch.tensor(members, dtype=torch.long)].numpy(),
        "pairs": _numpy(block).reshape(-1),
        "rest": float(trace.rest_scores[local]),
        "optimizer_step": int(part.optimizer_step[local]),
    }


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()


def own_skipped(part: Scored) -> dict[int, str]:
    """Groups that have no scores on any rank."""
    return {group: reason for group, reason in part.trace.skipped.items() if reason in REASONS}


def joined_over(ranks: Ranks, part: Scored) -> Scored:
    """The same on every rank: the scores of the mini-batch's responses from whoever has them. Collective."""
    if ranks.size == 1:
        return part
    found: dict[int, Entry] = {}
    skipped: dict[int, str] = {}
    warnings: list[str] = []
    metrics: list[dict[str, float]] = []
    own = own_entries(part), own_skipped(part), part.trace.warnings, part.trace.metrics
    for entries, theirs, said, numbers in ranks.gather(own):
        found |= entries
        skipped |= theirs
        warnings += [warning for warning in said if warning not in warnings]
        metrics.append(numbers)
    trace = joined_trace(
        part.rows,
        found,
        skipped=skipped,
        warnings=warnings,
        metrics=joined_metrics(metrics),
        meta=part.trace.meta,
        credit=part.trace.credit,
        config=part.trace.config,
    )
    steps = [found[row]["optimizer_step"] if row in found else 0 for row in part.rows.tolist()]
    return Scored(part.rows, torch.tensor(steps, dtype=torch.long), trace)


def joined_trace(rows: Tensor, found: dict[int, Entry], **shared: Any) -> InfluenceTrace:
    """One trace of a mini-batch, as a single rank would have made it."""
    local_of = {row: local for local, row in enumerate(rows.tolist())}
    lists = {name: [torch.empty(0) for _ in local_of] for name in ("position", "terms", "likelier")}
    rest = torch.zeros(len(local_of))
    pairwise: dict[int, tuple[list[int], Tensor]] = {}
    for row, entry in found.items():
        local = local_of[row]
        for name, values in lists.items():
            values[local] = torch.from_numpy(entry[name].copy())
        rest[local] = entry["rest"]
        if members := entry["members"].tolist():
            block = torch.from_numpy(entry["pairs"].copy()).view(-1, len(members))
            pairwise[local] = ([local_of[member] for member in members], block)
    return InfluenceTrace(
        position_scores=lists["position"],
        loss_term_scores=lists["terms"] if any(len(values) for values in lists["terms"]) else None,
        likelier_scores=lists["likelier"] if any(len(values) for values in lists["likelier"]) else None,
        rest_scores=rest,
        response_kernel=torch.empty(0, 0),
        _pairwise=pairwise,
        **shared,
    )


def joined_metrics(of_ranks: list[dict[str, float]]) -> dict[str, float]:
    """The numbers of a mini-batch from those that each rank has."""
    total: dict[str, float] = {}
    for name in dict.fromkeys(name for own in of_ranks for name in own):
        values = [own[name] for own in of_ranks if name in own]
        if name.startswith(LARGEST):
            total[name] = max(values)
        else:
            total[name] = sum(values) / (len(values) if name in MEANS else 1)
    return total
