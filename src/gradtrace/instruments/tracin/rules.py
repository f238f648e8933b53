"""From TracIn scores to what the update uses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradtrace.errors import GradtraceError
from gradtrace.instruments.tracin import TracinConfig, TracinReason

RULES = ("positive", "top_fraction", "drop_lowest", "soft", "none")


@dataclass(frozen=True, eq=False)
class Selected:
    kept: Tensor
    """bool[R]."""
    reason: Tensor
    """long[R]: `TracinReason`."""
    weight: Tensor
    """float32[R]: what an advantage is multiplied with; 0 where dropped, mean 1 over the kept."""
    fallback: bool = False
    note: str = ""
    """Why the rule was not followed, in words; empty if it was."""


def select(scores: Tensor, rule: str, options: TracinConfig | None = None) -> Selected:
    """Apply `rule` to responses with these scores (float[R], NaN = could not be scored; positive = helpful).

    Shares that are kept or dropped count responses whose score is not zero: a response of a group with one constant
    reward has no gradient, so that nothing can be said about it. `min_positive_ratio` counts the whole batch, as
    `tracin/positive_ratio` does. Never empty as long as one score is finite.
    """
    options = options or TracinConfig()
    if rule not in RULES:
        raise GradtraceError(f"there is no selection rule '{rule}'. Valid: {', '.join(RULES)}.")
    finite = torch.isfinite(scores)
    if len(scores) and not bool(finite.any()):
        raise GradtraceError(
            f"none of the {len(scores)} TracIn scores is finite: the gradients of training or validation overflow. "
            "Look at actor/grad_norm and tracin/val_grad_norm; lower the learning rate."
        )
    reason = torch.full((len(scores),), int(TracinReason.DROPPED_NON_FINITE))
    if not bool((scores[finite] != 0).any()):
        reason[finite] = int(TracinReason.KEPT_NO_SIGNAL)
        note = "every score is zero" if rule != "none" else ""
        return _selected(reason, note=note)
    if rule == "none":
        reason[finite] = int(TracinReason.KEPT_SCORE_ONLY)
        return _selected(reason)
    if rule == "soft":
        return _soft(scores, finite, reason, options.soft_temperature)
    positive, negative, zero = finite & (scores > 0), finite & (scores < 0), finite & (scores == 0)
    if rule == "drop_lowest":
        dropped = _extreme(scores, negative, options.drop_share, largest=False)
        reason[finite] = int(TracinReason.KEPT_NOT_LOWEST)
        reason[zero] = int(TracinReason.KEPT_ZERO)
        if int(dropped.sum()) < int(finite.sum()):
            reason[dropped] = int(TracinReason.DROPPED_LOWEST)
            return _selected(reason)
        return _selected(reason, note="all scores are negative and drop_share=1 would drop every response")
    reason[zero] = int(TracinReason.DROPPED_ZERO)
    counted = positive | negative
    if rule == "top_fraction":
        best = _extreme(scores, counted, options.top_fraction, largest=True)
        reason[counted] = int(TracinReason.DROPPED_BELOW_FRACTION)
        reason[best] = int(TracinReason.KEPT_TOP_FRACTION)
        return _selected(reason)
    ratio = int(positive.sum()) / len(scores)
    if ratio < options.min_positive_ratio or not ratio:
        best = _extreme(scores, counted, options.fallback_fraction, largest=True)
        reason[counted] = int(TracinReason.DROPPED_BELOW_FRACTION)
        reason[best] = int(TracinReason.KEPT_FALLBACK)
        note = (
            f"{ratio:.0%} of the scores are positive (min_positive_ratio="
            f"{options.min_positive_ratio:g}): the best {options.fallback_fraction:.0%} are kept instead"
        )
        return _selected(reason, fallback=True, note=note)
    reason[positive] = int(TracinReason.KEPT_POSITIVE)
    reason[negative] = int(TracinReason.DROPPED_NEGATIVE)
    return _selected(reason)


def _extreme(scores: Tensor, among: Tensor, share: float, largest: bool) -> Tensor:
    """bool[R]: the `share` largest or smallest of `among`, rounded; of the largest at least one. Ties: in order."""
    count = round(share * int(among.sum()))
    if largest:
        count = max(1, count)
    rows = among.nonzero().squeeze(-1)
    order = torch.argsort(scores[rows], descending=largest, stable=True)
    chosen = torch.zeros(len(scores), dtype=torch.bool)
    chosen[rows[order[:count]]] = True
    return chosen


def _soft(scores: Tensor, finite: Tensor, reason: Tensor, temperature: float) -> Selected:
    """Weights σ(I / (temperature · spread)) instead of a border."""
    counted = finite & (scores != 0)
    spread = scores[counted].square().mean().sqrt() * max(temperature, 1e-6)
    reason[finite] = int(TracinReason.KEPT_WEIGHTED)
    weight = torch.where(finite, torch.sigmoid(scores / spread), 0.0)
    return Selected(finite, reason, (weight / weight[finite].mean()).float())


KEPT = [int(reason) for reason in TracinReason if reason.name.startswith("KEPT_")]


def _selected(reason: Tensor, fallback: bool = False, note: str = "") -> Selected:
    kept = torch.isin(reason, torch.tensor(KEPT))
    return Selected(kept, reason, kept.float(), fallback, note)
