"""How much each response counts in a token's score."""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrace.attribution.errors import AttributionError


def contrast(accepted: Tensor, agg: str, exclude_self: bool, advantages: Tensor | None = None) -> Tensor:
    """[n, n]: row o holds the weights c_r of the responses in the score of a token that belongs to response o.

    Without `exclude_self` all rows are equal. With it the own response has weight 0 and, for `mean`, the
    means run over those that remain; a side on which none remains has no part in the score.
    """
    members = len(accepted)
    if agg == "mean" and not exclude_self:  # numbers, not tensors: for a few responses these take ten times as long
        labels = accepted.bool().tolist()
        share = {True: 1.0 / max(labels.count(True), 1), False: -1.0 / max(labels.count(False), 1)}
        return torch.tensor([share[label] for label in labels], dtype=torch.float64).expand(members, -1)
    accepted = accepted.bool()
    present = torch.ones(members, members, dtype=torch.float64)
    if exclude_self:
        present.fill_diagonal_(0.0)
    if agg == "advantage":
        if advantages is None:
            raise AttributionError("contrastive_agg='advantage' needs advantages: pass them to capture() or score()")
        return present * advantages.double()[None, :]
    positive = present * accepted.double()[None, :]
    negative = present * (~accepted).double()[None, :]
    if agg == "mean":
        positive = positive / positive.sum(1, keepdim=True).clamp(min=1.0)
        negative = negative / negative.sum(1, keepdim=True).clamp(min=1.0)
    return positive - negative
