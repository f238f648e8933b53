"""A step's influence trace on its way from the ranks to one file: each rank writes its part, the driver joins them.

A part is an npz of flat arrays in the run's `influence_trace/parts`. Ranks write after their last mini-batch,
without waiting for each other; the driver reads when the update has returned, and removes what it has joined.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradtrace.attribution import InfluenceTrace
from gradtrace.errors import GradtraceError
from gradtrace.instruments.influence.capture import Scored
from gradtrace.trace.atomic import atomic_write
from gradtrace.trace.safe_npz import dump_npz
from gradtrace.trace.schema import ragged

REASONS = ("not_captured", "non_finite")
MAXIMA = ("timing_s/", "influence_trace/debug_modules")
"""Metrics that are the same on all ranks, or run side by side: the largest counts. The others are added up."""


def part_file(folder: Path, step: int, rank: int) -> Path:
    return folder / f"step_{step:06d}.rank_{rank:05d}.npz"


def write_part(folder: Path, step: int, rank: int, scores: list[Scored], failure: str = "") -> None:
    """Scores of the responses that this rank trained on."""
    entries = [
        (part, local)
        for part in scores
        for local in range(len(part.rows))
        if len(part.trace.position_scores[local])
    ]
    position = [numpy(part.trace.position_scores[local]) for part, local in entries]
    terms = [
        numpy(part.trace.loss_term_scores[local]) if part.trace.loss_term_scores else np.empty(0, np.float32)
        for part, local in entries
    ]
    pairwise = [part.trace.pairwise_of(local) for part, local in entries]
    arrays: dict[str, np.ndarray] = {
        "mini_batch": np.array([int(part.optimizer_step[local]) for part, local in entries], np.int64),
        "row": np.array([int(part.rows[local]) for part, local in entries], np.int64),
        "rest": np.array([float(part.trace.rest_scores[local]) for part, local in entries], np.float32),
    }
    arrays["position"], arrays["position_offsets"] = ragged(position, "float32")
    arrays["terms"], arrays["terms_offsets"] = ragged(terms, "float32")
    members = [
        part.rows[torch.tensor(found, dtype=torch.long)].numpy()
        for (part, _), (found, _) in zip(entries, pairwise, strict=True)
    ]
    arrays["members"], arrays["members_offsets"] = ragged(members)
    arrays["pairs"], arrays["pairs_offsets"] = ragged([numpy(b).reshape(-1) for _, b in pairwise], "float32")
    about = {
        "failure": failure,
        "metrics": {str(int(part.optimizer_step[0])): part.trace.metrics for part in scores},
        "skipped": {
            str(group): reason
            for part in scores
            for group, reason in part.trace.skipped.items()
            if reason in REASONS
        },
    }
    arrays["about_json"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    atomic_write(part_file(folder, step, rank), dump_npz(arrays))


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
    found: dict[int, dict[int, tuple[np.ndarray, np.ndarray, float, list[int], np.ndarray]]] = {}
    metrics: dict[int, dict[str, float]] = {}
    skipped: dict[int, str] = {}
    failures: dict[int, str] = {}
    for rank in ranks:
        path = part_file(folder, step, rank)
        if not path.is_file():
            raise GradtraceError(
                f"rank {rank} left no part of the influence trace of step {step} ({path}). Every node must see this "
                "folder; give a shared one with gradtrace.run_dir"
            )
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(arrays["about_json"].tobytes())
        if about["failure"]:
            failures[rank] = about["failure"]
        skipped |= {int(group): reason for group, reason in about["skipped"].items()}
        for mini_batch, own in about["metrics"].items():
            add_metrics(metrics.setdefault(int(mini_batch), {}), own)
        for index, (mini_batch, row) in enumerate(zip(arrays["mini_batch"], arrays["row"], strict=True)):
            position, terms, members, pairs = (
                cut(arrays, name, index) for name in ("position", "terms", "members", "pairs")
            )
            found.setdefault(int(mini_batch), {})[int(row)] = (
                position,
                terms,
                float(arrays["rest"][index]),
                members.tolist(),
                pairs,
            )
    scored = [
        Scored(
            rows,
            torch.full_like(rows, index),
            joined_trace(rows, found.get(index, {}), skipped, metrics.get(index, {})),
        )
        for index, rows in enumerate(rows_of)
        if len(rows)
    ]
    for rank in ranks:
        part_file(folder, step, rank).unlink()
    return JoinedStep(scored, failures)


def cut(arrays: dict[str, np.ndarray], name: str, index: int) -> np.ndarray:
    begin, end = arrays[f"{name}_offsets"][index : index + 2]
    return arrays[name][begin:end]


def joined_trace(
    rows: Tensor, found: dict[int, Any], skipped: dict[int, str], metrics: dict[str, float]
) -> InfluenceTrace:
    """One trace of a mini-batch, as a single rank would have made it."""
    local_of = {row: local for local, row in enumerate(rows.tolist())}
    position = [torch.empty(0) for _ in local_of]
    terms = [torch.empty(0) for _ in local_of]
    rest = torch.zeros(len(local_of))
    pairwise: dict[int, tuple[list[int], Tensor]] = {}
    for row, (scores, own_terms, rest_score, members, pairs) in found.items():
        local = local_of[row]
        position[local] = torch.from_numpy(scores.copy())
        terms[local] = torch.from_numpy(own_terms.copy())
        rest[local] = rest_score
        if members:
            block = torch.from_numpy(pairs.copy()).view(-1, len(members))
            pairwise[local] = ([local_of[member] for member in members], block)
    return InfluenceTrace(
        position_scores=position,
        loss_term_scores=terms if any(len(t) for t in terms) else None,
        rest_scores=rest,
        response_kernel=torch.empty(0, 0),
        skipped=skipped,
        metrics=metrics,
        _pairwise=pairwise,
    )


def add_metrics(total: dict[str, float], own: dict[str, float]) -> None:
    """Add one rank's numbers of a mini-batch to those of the ranks before it."""
    for name, value in own.items():
        known = total.get(name, 0.0)
        total[name] = max(known, value) if name.startswith(MAXIMA) else known + value
