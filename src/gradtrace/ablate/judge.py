"""What scores are worth: do they separate accepted from rejected, find the first wrong token, agree with others?

All on dense arrays [R, T], NaN where a token has no score. Scores are turned beforehand so that they say what making a
token likelier does (`likelihood_scores`), whatever objective they came from.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from gradtrace.attribution import objective_sign
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.columns import response_advantages
from gradtrace.instruments.verify import agreement


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
    found = agreement.spearman(torch.from_numpy(a[both]), torch.from_numpy(b[both])) if both.any() else math.nan
    return None if math.isnan(found) else found
