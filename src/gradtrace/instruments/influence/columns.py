"""From the scores of a step's mini-batches to a table by row, and from that to the columns of its file."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradtrace.algorithms import accepted
from gradtrace.attribution import SIGN, UNIT, InfluenceConfig
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.columns import log_prob_columns, reward_part_columns, with_gaps
from gradtrace.instruments.contract import Table
from gradtrace.trace.columns import GroupStatus, Selection, ragged

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


# ---------------------------------------------------------------- what the file holds


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


def pairwise_columns(table: Table, rows: list[int], max_mb: float, batch: RolloutBatch) -> tuple[dict[str, Any], int]:
    """Effects of tokens on sibling responses, for as many responses as the budget allows; and how many that is."""
    index_of = {row: index for index, row in enumerate(rows)}
    budget = max_mb * 2**20
    members, blocks, stored = [], [], 0
    for row in rows:
        siblings, block = table.columns["members"][row].tolist(), table.columns["pairs"][row]
        length = len(table.columns["position"][row])
        budget -= 4 * length * len(siblings)
        if not siblings or budget < 0:
            members.append(np.empty(0, np.int32))
            blocks.append(np.empty(0, np.float32))
            continue
        full = torch.zeros(length, len(siblings))  # tokens past the cap have zeros, and `captured` says so
        full[: len(block)] = block
        members.append(np.array([index_of[sibling] for sibling in siblings], np.int32))
        blocks.append(with_gaps(full, batch, torch.tensor([row])).ravel())
        stored += 1
    if not stored:
        return {}, 0
    columns: dict[str, Any] = {}
    columns["pairwise_member"], columns["pairwise_member_offsets"] = ragged(members)
    columns["pairwise"], columns["pairwise_offsets"] = ragged(blocks, "float32")
    return columns, stored
