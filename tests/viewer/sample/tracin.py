"""TracIn steps for the sample data: scores that follow the advantages, with noise, and the rule applied to them."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradtrace.instruments.tracin import TracinReason
from gradtrace.instruments.tracin.diagnosis import certain_share, diagnose

DROPPED = 0.25
"""Share of the responses that the sample's rule may drop, the lowest negative ones."""


def tracin_columns(
    layout: dict[str, Any], candidates: int, rng: np.random.Generator
) -> tuple[dict[str, Any], dict[str, Any], dict[str, float]]:
    """(columns, meta, metrics) for a layout whose first `candidates` responses are the training batch and whose others
    are the validation set."""
    advantage = layout["advantage"][:candidates]
    worth = rng.normal(0.55, 0.8, candidates)  # a good answer may teach the wrong thing
    scores = np.where(advantage != 0, np.abs(advantage) * worth * 0.004, 0.0)
    half = 0.0012 + 0.5 * np.abs(scores) * rng.random(candidates)
    order = np.argsort(scores)
    lowest = [r for r in order[: int(DROPPED * candidates)] if scores[r] < 0]
    kept = np.ones(candidates, bool)
    kept[lowest] = False
    reasons = np.where(kept, int(TracinReason.KEPT_NOT_LOWEST), int(TracinReason.DROPPED_LOWEST))
    reasons[scores == 0] = int(TracinReason.KEPT_ZERO)
    others = len(layout["row"]) - candidates

    def with_validation(values: np.ndarray, filler: Any) -> np.ndarray:
        return np.concatenate([values, np.full(others, filler, values.dtype)])

    low, high = np.where(scores != 0, scores - half, np.nan), np.where(scores != 0, scores + half, np.nan)
    norms = {"layers.0": 0.21, "layers.1": 0.18, "lm_head": 0.33}
    val_norm = float(np.sqrt(sum(value**2 for value in norms.values())))
    val_groups = len(layout["group_id"]) - len(np.unique(layout["group"][:candidates]))
    columns = {
        **{name: value for name, value in layout.items() if name != "optimizer_step"},
        "score": with_validation(scores, np.nan),
        "kept": with_validation(kept, False),
        "reason": with_validation(reasons, int(TracinReason.VALIDATION)),
        "score_low": with_validation(low, np.nan),
        "score_high": with_validation(high, np.nan),
    }
    meta: dict[str, Any] = {
        "selection": "drop_lowest",
        "val_strategy": "random",
        "method": "tangent",
        "val_loss": float(-0.02 - 0.01 * rng.random()),
        "val_norm": val_norm,
        "val_norms": norms,
        "diagnosis": diagnose(scores, val_norm, 0.9, low, high, val_groups),
    }
    metrics = {
        "tracin/positive_ratio": float((scores > 0).mean()),
        "tracin/negative_ratio": float((scores < 0).mean()),
        "tracin/mean_ip": float(scores.mean()),
        "tracin/std_ip": float(scores.std()),
        "tracin/min_ip": float(scores.min()),
        "tracin/max_ip": float(scores.max()),
        "tracin/selected": float(kept.sum()),
        "tracin/selected_ratio": float(kept.mean()),
        "tracin/val_loss": meta["val_loss"],
        "tracin/val_reward": float(layout["reward"][candidates:].mean()),
        "tracin/certain_share": certain_share(scores, low, high),
        "tracin/val_grad_norm": val_norm,
        "tracin/fallback": 0.0,
        "perf/trained_responses": float(kept.sum()),
        "perf/generated_responses": float(candidates + others),
    }
    return columns, meta, metrics
