"""What is notable about a step's TracIn scores, in words."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gradtrace.instruments.tracin import TracinReason
from gradtrace.intervals import t_quantile
from gradtrace.trace.step import Step

MOSTLY_ZERO = 0.9
"""Share of zero scores from which on a step says so."""
NEGLIGIBLE = 1e-6
"""Scores add up to the product of two gradients; below this share of their norms they are rounding."""
ORTHOGONAL = 0.02
"""|cosine| of training and validation gradient below which a step on the batch does nothing for validation."""
HEAVY_SHARE, HEAVY_PART = 0.05, 0.5
"""Skewed: the largest 5 % of the scores hold more than half of their absolute sum."""
ONE_SIDED = 0.95
CERTAIN = 0.5
"""Share of scores whose sign must be certain for a validation set to be large enough."""
MIN_SCORES = 8
"""Fewer scores than this have no distribution to speak of."""
INTERVAL = 0.9


def spread_interval(parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(low, high), float64[R] each: 90 % interval of scores that are the sum of `parts` [K, R], one for each part of
    the validation set, by Student's t: the parts are few."""
    count, scores = len(parts), parts.sum(0)
    half = t_quantile(count - 1, INTERVAL) * np.sqrt(count) * parts.std(0, ddof=1) if count > 1 else np.nan
    return scores - half, scores + half


def certain_share(scores: np.ndarray, low: np.ndarray, high: np.ndarray) -> float:
    """The share, of the scores that are not zero, whose interval lies on one side of zero."""
    measured = np.isfinite(low) & np.isfinite(high) & (scores != 0)
    if not measured.any():
        return math.nan
    return float(((low[measured] > 0) | (high[measured] < 0)).mean())


def diagnose(
    scores: np.ndarray,
    val_norm: float,
    train_norm: float | None = None,
    low: np.ndarray | None = None,
    high: np.ndarray | None = None,
    val_prompts: int | None = None,
    cosine: float | None = None,
) -> list[str]:
    """Sentences about the scores [R] of one step; an empty list if all is as it should be.

    `val_norm`, `train_norm`: norms of the direction that scores are taken along (the validation gradient,
    preconditioned or not) and of the whole batch's gradient; `cosine`: of the two plain gradients, without it that of
    the direction; `low`, `high`: the scores' interval. What is None was not measured and is not judged.
    """
    scores = np.asarray(scores, dtype=np.float64)
    finite = scores[np.isfinite(scores)]
    sentences = []
    if len(finite) < len(scores):
        sentences.append(
            f"{len(scores) - len(finite)} of {len(scores)} scores are not finite: those gradients overflow."
        )
    if val_norm == 0:
        return [
            *sentences,
            "The validation gradient is zero: no validation prompt has responses with different rewards, so nothing "
            "can be told apart. Use another val_strategy, more prompts or easier ones.",
        ]
    if not len(finite):
        return sentences
    counted = finite[finite != 0]
    if not len(counted):
        return [*sentences, "Every score is zero: no training group has responses with different rewards."]
    if len(counted) <= (1 - MOSTLY_ZERO) * len(finite):
        sentences.append(
            f"{1 - len(counted) / len(finite):.0%} of the scores are zero: their groups have one constant reward and "
            "nothing to learn from. The task is too easy or too hard for the policy now."
        )
    sentences += _against_norms(counted, val_norm, train_norm, cosine)
    if len(counted) >= MIN_SCORES:
        sentences += _distribution(counted)
    if low is not None and high is not None and len(low) == len(scores):
        share = certain_share(scores, np.asarray(low), np.asarray(high))
        if share < CERTAIN:
            size = f" of {val_prompts} prompts" if val_prompts else ""
            sentences.append(
                f"Only {share:.0%} of the scores have a certain sign (90 % interval over validation "
                f"prompts): the validation set{size} is too small to tell helpful from harmful. Raise val_batch_size."
            )
    return sentences


def _against_norms(counted: np.ndarray, val_norm: float, train_norm: float | None, cosine: float | None) -> list[str]:
    if not train_norm:
        return []
    scale = val_norm * train_norm
    if np.abs(counted).sum() < NEGLIGIBLE * scale:
        return [
            f"The scores are next to zero: their absolute sum is {np.abs(counted).sum() / scale:.1e} of the product "
            "of the two gradients' norms, which is rounding. They say nothing."
        ]
    cosine = counted.sum() / scale if cosine is None else cosine
    if abs(cosine) < ORTHOGONAL:
        return [
            f"Training and validation gradient are nearly orthogonal (cosine {cosine:+.3f}): a step on the whole "
            "batch hardly moves the validation loss. Are the two sets about the same task, and the rewards right?"
        ]
    return []


def _distribution(counted: np.ndarray) -> list[str]:
    sentences = []
    largest = np.sort(np.abs(counted))[::-1]
    heavy = max(1, round(HEAVY_SHARE * len(largest)))
    part = largest[:heavy].sum() / largest.sum()
    if part > HEAVY_PART:
        sentences.append(
            f"The scores are skewed: the largest {heavy} of {len(largest)} hold {part:.0%} of their absolute sum. "
            "A few responses decide; look at them."
        )
    positive = float((counted > 0).mean())
    if positive > ONE_SIDED or positive < 1 - ONE_SIDED:
        side = "positive" if positive > 0.5 else "negative"
        sentences.append(
            f"{max(positive, 1 - positive):.0%} of the scores are {side}: selection has hardly anything to choose from."
        )
    return sentences


def diagnose_step(step: Step) -> list[str]:
    """`diagnose` of a stored step of a `tracin` trace."""
    candidates = step["reason"] != int(TracinReason.VALIDATION)
    meta: dict[str, Any] = step.meta
    interval: dict[str, Any] = {}
    if "score_low" in step and np.isfinite(step["score_low"][candidates]).any():
        interval = {"low": step["score_low"][candidates], "high": step["score_high"][candidates]}
    return diagnose(
        step["score"][candidates],
        float(meta.get("direction_norm", meta.get("val_norm", math.nan))),
        meta.get("train_norm"),
        cosine=meta.get("cosine"),
        val_prompts=len(np.unique(step["group"][~candidates])),
        **interval,
    )
