"""Scores from captured factors, of a step's mini-batches, as a table by row: what observers send to the reporter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradtrace.attribution.collectives import Ranks
from gradtrace.instruments.contract import Table
from gradtrace.instruments.influence.capture import Scored

OWN_MEANING = ("credit", "step")
"""Names in the tracer's description that mean something else in a file: its list of credits, the training step."""
LARGEST = (
    "timing_s/",
    "influence_trace/debug_modules",
    "influence_trace/debug_responses_captured",
    "influence_trace/uid_",
)
"""Metrics that are the same on all ranks, or measured side by side: the largest counts."""
MEANS = ("influence_trace/effective_dof", "influence_trace/label_r2")
"""Metrics that are averaged. The others are added up."""
ON_NO_RANK = ("not_captured", "non_finite")
"""Why a group has no scores on any rank; that another rank has them is no reason."""


def scores_table(scored: Sequence[Scored], non_finite: set[int] | None = None, ranks: Ranks | None = None) -> Table:
    """What this process has of each response, and the facts of all of them. Columns `position` and `terms` [t or 0],
    `captured` and `no_step` bool[t], `rest` and `optimizer_step` [], `pairs` [t, m] with `members` long[m], the rows
    that they are with. Collective."""
    ranks, table = ranks or Ranks(), Table()
    for part in scored:
        for local, row in enumerate(part.rows.tolist()):
            if len(part.trace.position_scores[local]):
                for name, values in _of_response(part, local).items():
                    table.put(name, {row: values})
    of_ranks = ranks.gather([_facts(part, alone=ranks.size == 1) for part in scored])
    facts = [_together(list(of_mini_batch)) for of_mini_batch in zip(*of_ranks, strict=True)]
    table.facts = {
        "skipped": [pair for own in facts for pair in own["skipped"]],
        "non_finite": sorted(non_finite or ()),
        "warnings": [warning for own in facts for warning in own["warnings"]],
        "metrics": combined([own["metrics"] for own in facts], ("influence_trace/debug_modules",)),
        "meta": {key: value for own in facts for key, value in own["meta"].items() if key not in OWN_MEANING},
        "mini_batches": len(facts),
    }
    return table


def _of_response(part: Scored, local: int) -> dict[str, Tensor]:
    trace = part.trace
    members, pairs = trace.pairwise_of(local)
    none = torch.empty(0)
    return {
        "position": trace.position_scores[local].float(),
        "terms": trace.loss_term_scores[local].float() if trace.loss_term_scores else none,
        "captured": trace.captured(local),
        "no_step": trace.without_step(local),
        "rest": trace.rest_scores[local].float(),
        "optimizer_step": part.optimizer_step[local],
        "pairs": pairs.float(),
        "members": part.rows[torch.tensor(members, dtype=torch.long)],
    }


def _facts(part: Scored, alone: bool) -> dict[str, Any]:
    """About a mini-batch; `alone`: there are no other ranks."""
    skipped = part.trace.skipped.items()
    return {
        "skipped": [[group, reason] for group, reason in skipped if alone or reason in ON_NO_RANK],
        "warnings": part.trace.warnings,
        "metrics": part.trace.metrics,
        "meta": part.trace.meta,
    }


def _together(of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    if len(of_ranks) == 1:
        return of_ranks[0]
    skipped = {group: reason for own in of_ranks for group, reason in own["skipped"]}
    return {
        "skipped": [[group, reason] for group, reason in skipped.items()],
        "warnings": list(dict.fromkeys(warning for own in of_ranks for warning in own["warnings"])),
        "metrics": combined([own["metrics"] for own in of_ranks], LARGEST),
        "meta": {key: value for own in of_ranks for key, value in own["meta"].items()},
    }


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
