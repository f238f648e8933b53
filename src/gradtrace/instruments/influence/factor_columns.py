"""Scores from captured factors: from a step's mini-batches to a table by row, and from that to the file's columns."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradtrace.algorithms import accepted
from gradtrace.attribution import SIGN, UNIT, InfluenceConfig
from gradtrace.attribution.collectives import Ranks
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.columns import log_prob_columns, reward_part_columns, with_gaps
from gradtrace.instruments.contract import Table
from gradtrace.instruments.influence.capture import Scored
from gradtrace.instruments.influence.columns import pairwise_columns
from gradtrace.trace.columns import GroupStatus, Selection

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
"""Metrics that are averaged over responses. The others are added up."""
RESPONSES = "influence_trace/selected_responses"
ON_NO_RANK = ("not_captured", "non_finite")
"""Why a group has no scores on any rank; that another rank has them is no reason."""
DESCRIBED = (
    *("hessian_mode", "hessian_source", "contrastive_agg", "scope_pass"),
    *("output_function", "exclude_self_response", "response_reduction", "projection_dim_factor"),
)
"""Knobs that say what scores mean; `scope_pass` is one of a run's trace only."""
STATUS_OF_REASON = {
    "constant_reward": GroupStatus.CONSTANT_REWARD,
    "not_captured": GroupStatus.NOT_CAPTURED,
    "non_finite": GroupStatus.NON_FINITE,
}


# ---------------------------------------------------------------- what observers send


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
    `MEANS` averaged over the responses of the parts that have them, the others added up."""
    total: dict[str, float] = {}
    for name in dict.fromkeys(name for own in of_parts for name in own):
        values = [own[name] for own in of_parts if name in own]
        if name.startswith(largest):
            total[name] = max(values)
        elif name in MEANS:
            responses = [own[RESPONSES] for own in of_parts if name in own]
            total[name] = math.fsum(map(operator.mul, values, responses)) / max(1.0, sum(responses))
        else:
            total[name] = sum(values)
    return total


# ---------------------------------------------------------------- what the file holds


def describe(config: InfluenceConfig) -> dict[str, Any]:
    """The meaning of the scores, for the file and the viewer."""
    credits = ["position", "loss_term"] if config.credit == "both" else [config.credit]
    return {
        "credit": credits,
        "pairwise_credit": "position" if config.credit != "loss_term" else "",
        **{knob: getattr(config, knob, False) for knob in DESCRIBED},
        "target": config.about,
        "accepted_rejected_scope": config.scope,
        "sign": SIGN,
        "unit": UNIT,
    }


def influence_columns(
    batch: RolloutBatch, table: Table, status: Tensor, config: InfluenceConfig, pairwise_max_mb: float
) -> tuple[Tensor, dict[str, Any], dict[str, Any]]:
    """The scored rows (long[r], ascending), their columns beside those that every file has, and what to say about
    them. `status`: long[G], the plan's."""
    status = status.clone()
    for group in table.facts["non_finite"]:
        status[group] = int(GroupStatus.NON_FINITE)
    for group, reason in table.facts["skipped"]:
        status[group] = int(STATUS_OF_REASON[reason])
    without = {group for group, _ in table.facts["skipped"]}
    scored = [row for row in sorted(table.columns.get("position", ())) if int(batch.group[row]) not in without]
    rows = torch.tensor(scored, dtype=torch.long)
    unscored = (status == int(GroupStatus.SCORED)) & ~torch.isin(torch.arange(len(status)), batch.group[rows])
    status[unscored] = int(GroupStatus.NOT_CAPTURED)
    threshold = getattr(config, "accepted_threshold", None)
    captured = in_order(table, "captured", scored)
    whole = np.array([bool(flags.all()) for flags in captured], dtype=bool)
    columns = {
        "group_status": status.numpy(),
        "accepted": accepted(batch.need("rewards"), batch.group, threshold)[rows].numpy(),
        "selection": np.where(whole, Selection.SELECTED, Selection.CUT_AT_TOKEN_CAP).astype(np.uint8),
        "optimizer_step": np.array([int(step) for step in in_order(table, "optimizer_step", scored)], dtype=np.int64),
        "prompt_influence": np.array([float(rest) for rest in in_order(table, "rest", scored)], dtype=np.float32),
        "captured": with_gaps(flat(captured, torch.bool), batch, rows, False),
        "no_step": with_gaps(flat(in_order(table, "no_step", scored), torch.bool), batch, rows, False),
        **log_prob_columns(batch, rows),
        **reward_part_columns(batch, rows),
    }
    for name, scores in score_columns(table, scored, config).items():
        columns[name] = with_gaps(scores, batch, rows)
    pairwise, stored = pairwise_columns(table, scored, pairwise_max_mb, batch)
    said = {"pairwise_responses": stored, "mini_batches": table.facts["mini_batches"]}
    return rows, columns | pairwise, table.facts["meta"] | said


def in_order(table: Table, name: str, rows: list[int]) -> list[Tensor]:
    return [table.columns[name][row] for row in rows]


def score_columns(table: Table, rows: list[int], config: InfluenceConfig) -> dict[str, np.ndarray]:
    """Scores from captured factors of the tokens that the policy wrote; zeros where none was captured."""
    columns = {}
    if config.credit != "loss_term":
        columns["influence_position"] = np.nan_to_num(flat(in_order(table, "position", rows), torch.float32))
    if config.wants_loss_term:
        columns["influence_loss_term"] = flat(in_order(table, "terms", rows), torch.float32)
    return columns


def flat(tensors: list[Tensor], dtype: torch.dtype) -> np.ndarray:
    """All tensors one after the other, on the CPU."""
    return torch.cat([torch.empty(0, dtype=dtype), *(tensor.to("cpu", dtype) for tensor in tensors)]).numpy()
