"""From the table of a step's observers to the columns of its file, for scores of the default kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradtrace.algorithms import accepted
from gradtrace.attribution import TokenParts
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.columns import log_prob_columns, response_advantages, reward_part_columns, with_gaps
from gradtrace.instruments.contract import Table
from gradtrace.trace.columns import SIGN_OF_PARTS, GroupStatus, Selection, ragged

BOOKS = ("objective_change", "change_by_batch", "change_by_own", "change_by_momentum")
"""Columns of measured groups."""
MEASURED = "influence_trace/predicted_over_measured"
LESS_LIKELY = "influence_trace/accepted_less_likely"


def parts_columns(
    batch: RolloutBatch, table: Table, status: Tensor, threshold: float | None = None, pairwise_max_mb: float = 64.0
) -> tuple[Tensor, dict[str, Any], dict[str, Any]]:
    """The scored rows (long[r], ascending), their columns beside those that every file has, and what to say about
    them. `status`: long[G], the plan's."""
    status = status_after(batch, table, status)
    found = table.columns.get("influence", {})
    scored = [row for row in sorted(found) if int(status[batch.group[row]]) == int(GroupStatus.SCORED)]
    rows = torch.tensor(scored, dtype=torch.long)
    counts = batch.written_counts[rows].tolist()

    def of_tokens(name: str, dtype: torch.dtype = torch.float32) -> np.ndarray:
        """Return a column of all tokens of the scored rows, NaN or False where the table lacks a row."""
        gap: Any = torch.nan if dtype.is_floating_point else False
        own = table.columns.get(name, {})
        parts = [
            own[row].to(dtype) if row in own else torch.full((count,), gap, dtype=dtype)
            for row, count in zip(scored, counts, strict=True)
        ]
        return with_gaps(torch.cat([torch.empty(0, dtype=dtype), *parts]).numpy(), batch, rows, gap)

    def of_responses(name: str, dtype: Any) -> np.ndarray:
        return np.array([table.columns[name][row].item() for row in scored], dtype=dtype)

    written = torch.ones(sum(counts), dtype=torch.bool).numpy()
    columns = {
        "group_status": status.numpy(),
        "accepted": accepted(batch.need("rewards"), batch.group, threshold)[rows].numpy(),
        "selection": np.full(len(scored), int(Selection.SELECTED), np.uint8),
        "optimizer_step": of_responses("optimizer_step", np.int64),
        "influence": of_tokens("influence"),
        "captured": with_gaps(written, batch, rows, False),
        **log_prob_columns(batch, rows),
        **reward_part_columns(batch, rows),
    }
    if "loss_weight" in table.columns:
        columns["loss_weight"] = of_responses("loss_weight", np.float64)
    for name in ("influence_own", "log_prob_before", "log_prob_after"):
        if set(table.columns.get(name, ())) & set(scored):
            columns[name] = of_tokens(name)
    if "no_step" in table.columns:
        columns["no_step"] = of_tokens("no_step", torch.bool)
    books = {entry["group"]: entry for entry in table.facts["books"]}
    if books:
        for name in BOOKS:
            values = [books.get(group, {}).get(name, np.nan) for group in range(len(batch.prompts))]
            columns[name] = np.array(values, np.float32)
    pairwise, stored = pairwise_columns(table, scored, pairwise_max_mb, batch)
    meta = {
        "unit": "nats",
        "sign": SIGN_OF_PARTS,
        "updates": table.facts["updates"],
        "alternatives": [{**one, "token": place_in_response(batch, **one)} for one in table.facts["alternatives"]],
        "own_gradients": table.facts.get("own_gradients", {}),
        "pairwise_responses": stored,
    }
    return rows, columns | pairwise, meta


def place_in_response(batch: RolloutBatch, row: int, token: int, **others: Any) -> int:
    """The index among all tokens of a response of the `token`-th that the policy wrote."""
    return int(batch.response_mask[row].nonzero()[token])


def table_of_parts(found: TokenParts) -> Table:
    """Turn the result of `InfluenceTracer.parts` into the table that an observer makes."""
    table, rows = Table(), range(len(found.tokens))
    table.put("influence", {row: found.tokens[row].float() for row in rows})
    table.put("optimizer_step", dict.fromkeys(rows, torch.tensor(0)))
    for group in found.measured.values():
        own = zip(group.responses, group.tokens, strict=True)
        table.put("influence_own", {row: values.float() for row, values in own})
    update: dict[str, Any] = {"optimizer_step": 0, "part": found.total, "second_moment": found.second_moment}
    update["learning_rate"] = None if found.moved else 0.0
    table.facts = {"updates": [update], "books": [], "alternatives": [], "non_finite": []}
    return table


def status_after(batch: RolloutBatch, table: Table, status: Tensor) -> Tensor:
    """The plan's, with groups whose scores are not finite or missing."""
    status, found = status.clone(), table.columns.get("influence", {})
    bad = {int(batch.group[row]) for row, values in found.items() if not bool(values.isfinite().all())}
    here = batch.group[torch.tensor(sorted(found), dtype=torch.long)]
    missing = (status == int(GroupStatus.SCORED)) & ~torch.isin(torch.arange(len(status)), here)
    status[missing] = int(GroupStatus.NOT_CAPTURED)
    status[sorted(bad | set(table.facts["non_finite"]))] = int(GroupStatus.NON_FINITE)
    return status


def pairwise_columns(table: Table, rows: list[int], max_mb: float, batch: RolloutBatch) -> tuple[dict[str, Any], int]:
    """Scores of tokens by single responses of their group, for as many responses as the budget allows; and how many
    that is. `pairs` [t, m] of the table are with the rows `members` [m]."""
    index_of, budget = {row: index for index, row in enumerate(rows)}, max_mb * 2**20
    members: list[np.ndarray] = []
    blocks: list[np.ndarray] = []
    stored, pairs = 0, table.columns.get("pairs", {})
    for row in rows:
        members.append(np.empty(0, np.int32))
        blocks.append(np.empty(0, np.float32))
        known = [] if row not in pairs else [index_of.get(one, -1) for one in table.columns["members"][row].tolist()]
        budget -= 4 * int(batch.response_lengths[row]) * len(known)
        if known and budget >= 0 and min(known) >= 0:
            full = torch.zeros(int(batch.written_counts[row]), len(known))
            full[: len(pairs[row])] = pairs[row]  # tokens past a cap have zeros and `captured` False
            members[-1] = np.array(known, np.int32)
            blocks[-1] = with_gaps(full, batch, torch.tensor([row])).ravel()
            stored += 1
    if not stored:
        return {}, 0
    columns: dict[str, Any] = {}
    columns["pairwise_member"], columns["pairwise_member_offsets"] = ragged(members)
    columns["pairwise"], columns["pairwise_offsets"] = ragged(blocks, "float32")
    return columns, stored


def parts_metrics(batch: RolloutBatch, table: Table) -> dict[str, float]:
    """Of the step's measured groups: what was predicted over what was measured, and the share of the responses with a
    positive advantage that became less likely by the real step."""
    books, found = table.facts["books"], {}
    measured = sum(entry["objective_change"] - entry["change_by_momentum"] for entry in books)
    if measured:
        found[MEASURED] = sum(entry["change_by_batch"] for entry in books) / measured
    before, after = (table.columns.get(f"log_prob_{when}", {}) for when in ("before", "after"))
    advantages = response_advantages(batch)
    good = [row for row in before if float(advantages[row]) > 0]
    if good:
        fell = [float((after[row].double() - before[row].double()).sum()) < 0 for row in good]
        found[LESS_LIKELY] = sum(fell) / len(fell)
    return found
