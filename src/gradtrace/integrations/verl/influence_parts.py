"""A step's influence trace on its way from the ranks to one file: each rank writes its part after its last mini-batch,
and the driver joins them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradtrace.attribution import InfluenceTrace
from gradtrace.instruments.influence.capture import Scored
from gradtrace.integrations.verl.rank_files import cut, put_ragged, read_rank_files, write_rank_file

REASONS = ("not_captured", "non_finite")
RAGGED = ("position", "terms", "likelier", "members", "pairs")
"""Columns with a list for each response."""
MAXIMA = ("timing_s/", "influence_trace/debug_modules")
"""Metrics that are the same on all ranks, or run side by side: the largest counts. The others are added up."""


def write_part(folder: Path, step: int, rank: int, scores: list[Scored], failure: str = "") -> None:
    """Scores of the responses that this rank trained on."""
    entries = [
        (part, local)
        for part in scores
        for local in range(len(part.rows))
        if len(part.trace.position_scores[local])
    ]
    position = [numpy(part.trace.position_scores[local]) for part, local in entries]
    terms, likelier = (
        [
            numpy(scores[local]) if scores else np.empty(0, np.float32)
            for scores, local in ((getattr(part.trace, name), local) for part, local in entries)
        ]
        for name in ("loss_term_scores", "likelier_scores")
    )
    pairwise = [part.trace.pairwise_of(local) for part, local in entries]
    arrays: dict[str, np.ndarray] = {
        "mini_batch": np.array([int(part.optimizer_step[local]) for part, local in entries], np.int64),
        "row": np.array([int(part.rows[local]) for part, local in entries], np.int64),
        "rest": np.array([float(part.trace.rest_scores[local]) for part, local in entries], np.float32),
    }
    members = [
        part.rows[torch.tensor(found, dtype=torch.long)].numpy()
        for (part, _), (found, _) in zip(entries, pairwise, strict=True)
    ]
    put_ragged(arrays, "position", position, "float32")
    put_ragged(arrays, "terms", terms, "float32")
    put_ragged(arrays, "likelier", likelier, "float32")
    put_ragged(arrays, "members", members)
    put_ragged(arrays, "pairs", [numpy(block).reshape(-1) for _, block in pairwise], "float32")
    about = {
        "failure": failure,
        "meta": scores[-1].trace.meta if scores else {},
        "credit": scores[-1].trace.credit if scores else "",
        "warnings": [warning for part in scores for warning in part.trace.warnings],
        "metrics": {str(int(part.optimizer_step[0])): part.trace.metrics for part in scores},
        "skipped": {
            str(group): reason
            for part in scores
            for group, reason in part.trace.skipped.items()
            if reason in REASONS
        },
    }
    write_rank_file(folder, step, rank, arrays, about)


def numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()


@dataclass(eq=False)
class JoinedStep:
    scored: list[Scored]
    failures: dict[int, str]
    """Rank → why it has no part."""


def join_parts(folder: Path, step: int, ranks: list[int], rows_of: list[Tensor]) -> JoinedStep:
    """The step's scores from the parts of all `ranks`. `rows_of`: per mini-batch the rows that were to be scored.
    Parts that were joined are removed."""
    found: dict[int, dict[int, dict[str, Any]]] = {}
    metrics: dict[int, dict[str, float]] = {}
    shared: dict[str, Any] = {"skipped": {}, "meta": {}, "credit": "", "warnings": []}
    failures: dict[int, str] = {}
    for rank, (arrays, about) in read_rank_files(folder, step, ranks, "influence trace").items():
        if about["failure"]:
            failures[rank] = about["failure"]
        shared["skipped"] |= {int(group): reason for group, reason in about["skipped"].items()}
        shared["meta"] |= about["meta"]
        shared["credit"] = shared["credit"] or about["credit"]
        shared["warnings"] += about["warnings"]
        for mini_batch, own in about["metrics"].items():
            add_metrics(metrics.setdefault(int(mini_batch), {}), own)
        for index, (mini_batch, row) in enumerate(zip(arrays["mini_batch"], arrays["row"], strict=True)):
            entry = {name: cut(arrays, name, index) for name in RAGGED} | {
                "rest": float(arrays["rest"][index])
            }
            found.setdefault(int(mini_batch), {})[int(row)] = entry
    scored = [
        Scored(
            rows,
            torch.full_like(rows, index),
            joined_trace(rows, found.get(index, {}), metrics=metrics.get(index, {}), **shared),
        )
        for index, rows in enumerate(rows_of)
        if len(rows)
    ]
    return JoinedStep(scored, failures)


def joined_trace(rows: Tensor, found: dict[int, dict[str, Any]], **shared: Any) -> InfluenceTrace:
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


def add_metrics(total: dict[str, float], own: dict[str, float]) -> None:
    """Add one rank's numbers of a mini-batch to those of the ranks before it."""
    for name, value in own.items():
        known = total.get(name, 0.0)
        total[name] = max(known, value) if name.startswith(MAXIMA) else known + value
