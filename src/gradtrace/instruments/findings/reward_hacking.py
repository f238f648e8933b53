"""Reward hacking: among accepted responses, a cluster of like gradients over many prompts, odd and growing.

A right answer's gradient is about its own prompt. A trick that pays everywhere has one gradient everywhere: responses
that use it resemble each other across prompts, and other accepted responses do not. So the gradients of the accepted
responses of the last steps (the sketches of the blame trace, each scaled to length 1) are split along their first
principal component; its tighter end, over prompts, is the cluster. Where nothing is hacked, that component explains
little and neither end is tight.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from gradtrace.algorithms import accepted
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.blame.shares import StepBlame
from gradtrace.instruments.findings.base import Culprit, Finding, Moment, sure

LIKENESS, SEPARATION, SHARE = "hacking/likeness", "hacking/separation", "hacking/cluster_share"
STEPS, MOST = 8, 64
"""Steps that are looked at together, and responses that are kept of each."""
FEW_STEPS, FEW = 6, 40
"""With fewer steps or responses nothing is said."""
END = 5
"""The ends of the component are a fifth of the responses each."""


@dataclass(frozen=True, eq=False)
class Cluster:
    rows: Tensor
    """long[a]: this step's accepted responses."""
    score: Tensor
    """float64[a]: place along the component; larger = nearer to the cluster."""
    members: Tensor
    """long[m]: those of `rows` in the cluster."""
    likeness: float
    """Mean cosine between the gradients at the component's tighter end, of different prompts."""
    separation: float
    """Share of the variance that the component explains."""
    is_settled: bool
    """There were enough steps and responses."""

    def statistics(self) -> dict[str, float]:
        share = len(self.members) / max(1, len(self.rows))
        return {LIKENESS: self.likeness, SEPARATION: self.separation, SHARE: share} if self.is_settled else {}


class AcceptedGradients:
    """The accepted responses of the last steps. A run that is resumed begins to collect anew."""

    def __init__(self) -> None:
        self._past: deque[tuple[Tensor, Tensor]] = deque(maxlen=STEPS - 1)
        """(unit sketches [k, D], numbers of their prompts [k], different in every step)."""
        self._prompts = 0
        self.last: Cluster | None = None

    def see(self, batch: RolloutBatch, blame: StepBlame) -> Cluster | None:
        chosen = accepted(batch.need("rewards"), batch.group)
        rows = torch.tensor([row for row in blame.rows.tolist() if bool(chosen[row]) and row in blame.sketch])
        self.last = None
        if len(rows):
            sketches = torch.stack([blame.sketch[row] for row in rows.tolist()]).float()
            units = sketches / sketches.norm(dim=1, keepdim=True).clamp(min=1e-30)
            prompts = batch.group[rows] + self._prompts
            self._prompts += len(batch.prompts)
            self.last = self._cluster(rows, units, prompts)
            self._past.append((units[:MOST], prompts[:MOST]))
        return self.last

    def _cluster(self, rows: Tensor, units: Tensor, prompts: Tensor) -> Cluster | None:
        pool = torch.cat([*(past for past, _ in self._past), units])
        owner = torch.cat([*(past for _, past in self._past), prompts])
        if len(pool) < 2 * END:
            return None
        cosine = (pool @ pool.T).double()
        centred = cosine - cosine.mean(0) - cosine.mean(1, keepdim=True) + cosine.mean()
        values, vectors = torch.linalg.eigh(centred)
        place = vectors[:, -1] * values[-1].clamp(min=0).sqrt()
        ends = {sign: likeness_of(cosine, owner, (sign * place).topk(len(pool) // END).indices) for sign in (1, -1)}
        place = place * max(ends, key=lambda sign: ends[sign])
        here = place[-len(rows) :]
        return Cluster(
            rows,
            here,
            rows[here > split(place)],
            max(ends.values()),
            float(values[-1] / values.clamp(min=0).sum().clamp(min=1e-30)),
            len(self._past) + 1 >= FEW_STEPS and len(pool) >= FEW,
        )


def likeness_of(cosine: Tensor, owner: Tensor, chosen: Tensor) -> float:
    """Mean cosine between the chosen, of different prompts."""
    apart = owner[chosen][:, None] != owner[chosen]
    return float((cosine[chosen][:, chosen] * apart).sum() / apart.sum().clamp(min=1))


def split(values: Tensor) -> float:
    """The threshold that cuts values into two parts of the least variance (Otsu's)."""
    ordered = values.sort().values
    low = torch.arange(1, len(values)).double()
    sums = ordered.cumsum(0)
    means = sums[:-1] / low, (sums[-1] - sums[:-1]) / (len(values) - low)
    best = int((low * (len(values) - low) * (means[1] - means[0]).square()).argmax())
    return float(ordered[best] + ordered[best + 1]) / 2


def detect(moment: Moment) -> Finding | None:
    found, knobs = moment.accepted, moment.knobs
    if found is None or not found.is_settled or moment.blame is None:
        return None
    past = moment.before(LIKENESS)
    least = float(past.min()) if len(past) else 1.0
    if found.likeness < max(knobs.hacking_likeness, knobs.hacking_growth * least):
        return None
    if found.separation < knobs.hacking_separation:
        return None
    tokens = telling_tokens(moment, found)
    culprits = [*tokens, *(moment.response(int(row)) for row in found.members[:3])]
    shown = ", ".join(repr(token.text) for token in tokens) or "no token in particular"
    share = len(found.members) / max(1, len(found.rows))
    return Finding(
        f"{share:.0%} of the accepted responses push the policy the same way whatever the prompt (cosine "
        f"{found.likeness:.2f} across prompts, {least:.2f} before), unlike the other accepted ones: a trick that pays "
        f"everywhere? It is about {shown}.",
        sure(found.likeness, knobs.hacking_likeness),
        {"cluster_share": share, "likeness": found.likeness, "before": least, "separation": found.separation},
        culprits,
    )


def telling_tokens(moment: Moment, found: Cluster) -> list[Culprit]:
    """Pairs of neighbouring tokens whose share of the gradient is larger in the cluster than in other accepted ones."""
    assert moment.blame is not None
    weights: dict[tuple[int, int], float] = {}
    members = set(found.members.tolist())
    for row in found.rows.tolist():
        mask = moment.batch.response_mask[row]
        ids, shares = moment.batch.responses[row][mask].tolist(), moment.blame.share[row][mask].abs()
        total = float(shares.sum()) or 1.0
        weight = 1.0 / len(members) if row in members else -1.0 / (len(found.rows) - len(members))
        for place, token in enumerate(ids):
            pair = (ids[place - 1] if place else -1, token)
            weights[pair] = weights.get(pair, 0.0) + weight * float(shares[place]) / total
    best = sorted(weights, key=lambda pair: -weights[pair])[:3]
    return [
        Culprit(moment.decode([token for token in pair if token >= 0]), share=weights[pair])
        for pair in best
        if weights[pair] > 0
    ]
