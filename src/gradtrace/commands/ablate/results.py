"""The table of an ablation, of whatever cells are there: what scores cost, what they tell apart, how far they agree."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradtrace.algorithms import accepted
from gradtrace.attribution import objective_sign
from gradtrace.batch import RolloutBatch
from gradtrace.commands.ablate.session import CELLS, ROLLOUT, SHARED, cell_name, parse_rollout
from gradtrace.errors import GradtraceError
from gradtrace.instruments.columns import response_advantages
from gradtrace.instruments.verify.measure import spearman as rank_correlation
from gradtrace.trace.columns import INFLUENCE_SCORES
from gradtrace.trace.files import atomic_write

FORMAT_VERSION = 1
COLUMNS: list[dict[str, Any]] = [
    {"key": "time_s", "label": "time", "unit": "s", "better": "lower",
     "meaning": "forward, backward and scoring with the trace on, median"},
    {"key": "overhead", "label": "overhead", "unit": "", "better": "lower",
     "meaning": "that time over the time of the same pass without a trace, measured in turn with it, median"},
    {"key": "peak_bytes", "label": "memory", "unit": "bytes", "better": "lower",
     "meaning": "largest memory above that before the pass"},
    {"key": "rows", "label": "rows", "unit": "tokens", "better": None, "meaning": "token scores made"},
    {"key": "auc", "label": "AUC", "unit": "", "better": "higher",
     "meaning": "probability that an accepted response has a larger mean score than a rejected one of its group"},
    {"key": "label_r2", "label": "label R²", "unit": "", "better": "lower",
     "meaning": "how much of the responses' total scores labels and lengths explain; near 1 an AUC of 1 means nothing"},
    {"key": "first_wrong_hit1", "label": "first wrong hit@1", "unit": "", "better": "higher",
     "meaning": "share of rejected responses whose first wrong token has the most negative score"},
    {"key": "first_wrong_percentile", "label": "first wrong percentile", "unit": "", "better": "higher",
     "meaning": "mean share of the other tokens that score higher than the first wrong one; 0.5 is chance"},
]  # fmt: skip


def collect(folder: Path) -> dict[str, Any]:
    """Write ablation.md, .csv and .json into `folder`; returns the content of the last."""
    if not (folder / SHARED).is_file():
        raise GradtraceError(f"{folder} holds no ablation: there is no {SHARED}. `gradtrace ablate --help` makes one.")
    result = table_of(folder)
    atomic_write(folder / "ablation.json", json.dumps(result, indent=2, allow_nan=False).encode())
    atomic_write(folder / "ablation.csv", to_csv(result).encode())
    atomic_write(folder / "ablation.md", (costs_and_ranks(result) + agreement(result)).encode())
    return result


def table_of(folder: Path) -> dict[str, Any]:
    """The content of ablation.json; its keys are in docs/ablation.md."""
    shared = json.loads((folder / SHARED).read_text())
    batch, wrong = parse_rollout((folder / ROLLOUT).read_bytes())
    cells, scores = [], {}
    for values in itertools.product(*shared["axes"].values()):
        settings = dict(zip(shared["axes"], values, strict=True))
        name = cell_name(settings)
        cell, dense = _cell(folder / CELLS / f"{name}.npz", batch, wrong.numpy())
        cells.append({"name": name, "settings": settings} | cell)
        if dense is not None:
            scores[name] = dense
    names = list(scores)
    kinds = {cell["score"] for cell in cells if cell["score"]}
    return {
        "format_version": FORMAT_VERSION,
        "name": folder.resolve().name,
        **{key: shared[key] for key in ("recipe", "overrides", "checkpoint", "rollout", "baseline")},
        "sweep": shared["axes"],
        "columns": COLUMNS,
        "cells": cells,
        "agreement": {
            "measure": "spearman",
            "score": kinds.pop() if len(kinds) == 1 else "mixed",
            "names": names,
            "matrix": [[spearman(scores[a], scores[b]) for b in names] for a in names],
        },
        "machine": shared["machine"],
        "versions": shared["versions"],
    }


def _cell(file: Path, batch: RolloutBatch, wrong: np.ndarray) -> tuple[dict[str, Any], np.ndarray | None]:
    """A cell's row of the table, and its scores [R, T]."""
    keys = ("time_s", "time_s_all", "overhead", "peak_bytes", "rows", "responses", "groups", "auc", "auc_pairs",
            "label_r2", "first_wrong_hit1", "first_wrong_percentile", "first_wrong_responses", "score")  # fmt: skip
    row: dict[str, Any] = {"status": "missing", "error": None} | dict.fromkeys(keys)
    failed = file.with_suffix(".failed")
    if not file.exists():
        if failed.exists():
            row |= {"status": "failed", "error": failed.read_text()}
        return row, None
    with np.load(file, allow_pickle=False) as columns:
        meta = json.loads(columns["meta_json"].tobytes())
        score = next(name for name in reversed(INFLUENCE_SCORES) if name in columns)
        flat = columns[score].astype(np.float64)
        dense = likelihood_scores(
            batch, columns["row"], columns["length"], flat, columns["captured"], meta["output_function"]
        )
    good, group = accepted(batch.need("rewards"), batch.group).numpy(), batch.group.numpy()
    scored = ~np.isnan(dense).all(1)
    row |= {key: meta.get(key) for key in ("time_s", "time_s_all", "overhead", "peak_bytes")}
    row |= {
        "status": "done",
        "rows": int((~np.isnan(dense)).sum()),
        "responses": int(scored.sum()),
        "groups": len(np.unique(group[scored])),
        "score": score,
    }
    row["auc"], row["auc_pairs"] = separation(dense, good, group)
    row["label_r2"] = label_r2(dense, good, group, response_advantages(batch).numpy())
    hit, percentile, count = first_wrong_ranks(dense, good, wrong)
    row |= {"first_wrong_hit1": hit, "first_wrong_percentile": percentile, "first_wrong_responses": count}
    return row, dense


def to_csv(result: dict[str, Any]) -> str:
    """One line per cell: the swept settings, then the columns, then agreement with every other cell."""
    axes, names = list(result["sweep"]), result["agreement"]["names"]
    keys = [column["key"] for column in result["columns"]]
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow([*axes, "status", *keys, *(f"spearman:{name}" for name in names)])
    for cell in result["cells"]:
        done = cell["name"] in names
        agreement = result["agreement"]["matrix"][names.index(cell["name"])] if done else [""] * len(names)
        settings = [cell["settings"][axis] for axis in axes]
        writer.writerow([*settings, cell["status"], *(cell[key] for key in keys), *agreement])
    return buffer.getvalue()


def costs_and_ranks(result: dict[str, Any]) -> str:
    """A line per cell, numbered."""
    rollout, axes = result["rollout"], list(result["sweep"])
    theta = f"checkpoint {result['checkpoint']}" if result["checkpoint"] else "the recipe's first weights"
    lines = [
        f"# Ablation {result['name']}",
        "",
        f"One rollout of `{result['recipe']}` at {theta}: {rollout['responses']} responses to "
        f"{rollout['prompts']} prompts, {rollout['tokens']} tokens, {rollout['groups_mixed']} mixed groups "
        f"({rollout['accepted']} accepted, {rollout['rejected']} rejected).",
        f"The same pass without a trace: {_shown('time_s', result['baseline']['time_s'])}, "
        f"{_shown('peak_bytes', result['baseline']['peak_bytes'])}. {result['machine']}.",
        "",
        "| # | " + " | ".join([*axes, *(column["label"] for column in result["columns"])]) + " |",
        "|---:|" + "---|" * len(axes) + "---:|" * len(result["columns"]),
    ]
    for number, cell in enumerate(result["cells"], 1):
        shown = [_shown(column["key"], cell[column["key"]]) for column in result["columns"]]
        if cell["status"] != "done":
            shown[0] = cell["status"]
        settings = (cell["settings"][axis] for axis in axes)
        lines.append("| " + " | ".join([str(number), *settings, *shown]) + " |")
    return "\n".join(lines) + "\n"


def agreement(result: dict[str, Any]) -> str:
    """Agreement of every two cells that are done, by their numbers; empty with fewer than two."""
    names = result["agreement"]["names"]
    if len(names) < 2:
        return ""
    places = {cell["name"]: number for number, cell in enumerate(result["cells"], 1)}
    numbers = [str(places[name]) for name in names]
    lines = [
        "",
        "Agreement (Spearman's rank correlation of token scores) of the cells with these numbers:",
        "",
        "| | " + " | ".join(numbers) + " |",
        "|---:|" + "---:|" * len(names),
    ]
    for number, row in zip(numbers, result["agreement"]["matrix"], strict=True):
        values = ["–" if value is None else f"{value:.2f}" for value in row]
        lines.append(f"| **{number}** | " + " | ".join(values) + " |")
    return "\n".join(lines) + "\n"


def _shown(key: str, value: Any) -> str:
    if value is None:
        return "–"
    if key == "time_s":
        return f"{value:.3f} s"
    if key == "peak_bytes":
        return f"{value / 2**20:.1f} MiB"
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def likelihood_scores(
    batch: RolloutBatch,
    rows: np.ndarray,
    lengths: np.ndarray,
    scores: np.ndarray,
    captured: np.ndarray,
    output: str,
) -> np.ndarray:
    """float64[R, T] from the flat scores of the responses `rows`."""
    sign = objective_sign(output, response_advantages(batch), batch.need("rewards")).numpy()
    dense = np.full(batch.response_mask.shape, np.nan)
    start = 0
    for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
        own = slice(start, start + length)
        dense[row, :length] = np.where(captured[own], scores[own] * sign[row], np.nan)
        start += length
    return dense


def separation(dense: np.ndarray, good: np.ndarray, group: np.ndarray) -> tuple[float | None, int]:
    """(AUC, pairs): how often an accepted response's mean score exceeds that of a rejected one of its group."""
    scored = ~np.isnan(dense).all(1)
    means = np.full(len(dense), np.nan)
    means[scored] = np.nanmean(dense[scored], axis=1)
    wins = pairs = 0.0
    for number in np.unique(group[scored]):
        members = scored & (group == number)
        better, worse = means[members & good], means[members & ~good]
        wins += (better[:, None] > worse).sum() + 0.5 * (better[:, None] == worse).sum()
        pairs += len(better) * len(worse)
    return (float(wins / pairs) if pairs else None), int(pairs)


def label_r2(dense: np.ndarray, good: np.ndarray, group: np.ndarray, advantages: np.ndarray) -> float | None:
    """R² of the responses' total scores on label · length and label · length · |advantage|, the label ±1 over how many
    of its group share it. Near 1 the scores say nothing but who was accepted, and AUC is 1 by itself."""
    scored = ~np.isnan(dense).all(1)
    if scored.sum() < 8:
        return None
    lengths, totals = (~np.isnan(dense)).sum(1)[scored], np.nansum(dense, axis=1)[scored]
    sides = group * 2 + good
    share = np.array([(sides[scored] == side).sum() for side in sides[scored]])
    label = np.where(good[scored], 1.0, -1.0) * lengths / share
    features = np.stack([np.ones_like(label), label, label * np.abs(advantages[scored])], 1)
    fitted = features @ np.linalg.lstsq(features, totals, rcond=None)[0]
    spread = ((totals - totals.mean()) ** 2).sum()
    return float(1 - ((totals - fitted) ** 2).sum() / spread) if spread else None


def first_wrong_ranks(dense: np.ndarray, good: np.ndarray, wrong: np.ndarray) -> tuple[float | None, float | None, int]:
    """(hit@1, mean percentile, responses) of the first wrong token in rejected responses, the most negative first."""
    hits, percentiles = [], []
    for row in np.flatnonzero((wrong >= 0) & ~good):
        own = dense[row][~np.isnan(dense[row])]
        if wrong[row] >= dense.shape[1] or np.isnan(dense[row, wrong[row]]) or len(own) < 2:
            continue
        value = dense[row, wrong[row]]
        rank = (own < value).sum() + ((own == value).sum() - 1) / 2  # 0 = the most negative of all
        hits.append(rank < 0.5)
        percentiles.append(1 - rank / (len(own) - 1))
    if not hits:
        return None, None, 0
    return float(np.mean(hits)), float(np.mean(percentiles)), len(hits)


def spearman(a: np.ndarray, b: np.ndarray) -> float | None:
    """Rank correlation over the tokens that both have; None where it is not defined."""
    both = ~np.isnan(a) & ~np.isnan(b)
    found = rank_correlation(torch.from_numpy(a[both]), torch.from_numpy(b[both])) if both.any() else math.nan
    return None if math.isnan(found) else found
