"""A step's influence trace on its way from the ranks to one file: each rank writes its part after its last mini-batch,
and the driver joins them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradtrace.instruments.influence.capture import Scored
from gradtrace.instruments.influence.join import (
    Entry,
    joined_metrics,
    joined_trace,
    own_entries,
    own_skipped,
)
from gradtrace.integrations.verl.rank_files import cut, put_ragged, read_rank_files, write_rank_file

RAGGED = {
    "position": "float32",
    "terms": "float32",
    "likelier": "float32",
    "members": "int32",
    "pairs": "float32",
}
"""Columns with a list for each response."""


def write_part(folder: Path, step: int, rank: int, scores: list[Scored], failure: str = "") -> None:
    """Scores of the responses that this rank trained on."""
    entries = [(row, entry) for part in scores for row, entry in own_entries(part).items()]
    arrays: dict[str, np.ndarray] = {
        "mini_batch": np.array([entry["optimizer_step"] for _, entry in entries], np.int64),
        "row": np.array([row for row, _ in entries], np.int64),
        "rest": np.array([entry["rest"] for _, entry in entries], np.float32),
    }
    for name, dtype in RAGGED.items():
        put_ragged(arrays, name, [entry[name] for _, entry in entries], dtype)
    about = {
        "failure": failure,
        "meta": scores[-1].trace.meta if scores else {},
        "credit": scores[-1].trace.credit if scores else "",
        "warnings": [warning for part in scores for warning in part.trace.warnings],
        "metrics": {str(int(part.optimizer_step[0])): part.trace.metrics for part in scores},
        "skipped": {str(group): reason for part in scores for group, reason in own_skipped(part).items()},
    }
    write_rank_file(folder, step, rank, arrays, about)


@dataclass(eq=False)
class JoinedStep:
    scored: list[Scored]
    failures: dict[int, str]
    """Rank → why it has no part."""


def join_parts(folder: Path, step: int, ranks: list[int], rows_of: list[Tensor]) -> JoinedStep:
    """The step's scores from the parts of all `ranks`. `rows_of`: per mini-batch the rows that were to be scored.
    Parts that were joined are removed."""
    found: dict[int, dict[int, Entry]] = {}
    metrics: dict[int, list[dict[str, float]]] = {}
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
            metrics.setdefault(int(mini_batch), []).append(own)
        for index, (mini_batch, row) in enumerate(zip(arrays["mini_batch"], arrays["row"], strict=True)):
            entry = {name: cut(arrays, name, index) for name in RAGGED} | {
                "rest": float(arrays["rest"][index])
            }
            found.setdefault(int(mini_batch), {})[int(row)] = entry
    scored = [
        Scored(
            rows,
            torch.full_like(rows, index),
            joined_trace(
                rows, found.get(index, {}), metrics=joined_metrics(metrics.get(index, [])), **shared
            ),
        )
        for index, rows in enumerate(rows_of)
        if len(rows)
    ]
    return JoinedStep(scored, failures)
