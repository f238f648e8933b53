"""Detectors of what goes wrong with rewards: jumps, parts, groups without contrast, validation, and hacking."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from gradtrace.algorithms import accepted
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.blame.reporter import StepBlame
from gradtrace.instruments.findings.base import Finding, Moment, Named, named, sure
from gradtrace.intervals import t_quantile

REWARD = "critic/rewards/mean"
COMPARED = 5
"""Steps whose mean the new one is held against."""
CONSTANT, SAME = "batch/constant_groups", "batch/identical_siblings"
LIKENESS, SEPARATION, SHARE = "hacking/likeness", "hacking/separation", "hacking/cluster_share"
STEPS, MOST = 8, 64
"""Steps that are looked at together, and responses that are kept of each."""
FEW_STEPS, FEW = 6, 40
"""With fewer steps or responses nothing is said."""
END = 5
"""The ends of the component are a fifth of the responses each."""


def step_error(moment: Moment, before: np.ndarray) -> tuple[float, int]:
    """Standard error of one step's mean reward, and of how many degrees of freedom it is. Two things tell it: how much
    the means of its prompts differ, and how much the steps so far do; a few quiet steps, or a few prompts of one kind,
    would each make it too small."""
    group, rewards = moment.batch.group, moment.batch.need("rewards").double()
    counts = torch.bincount(group)
    means = (torch.bincount(group, rewards) / counts)[counts > 0]
    drawn = float(means.var() / len(means)) if len(means) > 1 else 0.0
    steps = float(np.diff(before).var(ddof=1)) / 2 if len(before) > 2 else 0.0
    freedom = (len(means) - 1, len(before) - 2)
    pooled = (freedom[0] * drawn + freedom[1] * steps) / max(sum(freedom), 1)
    return max(pooled**0.5, 1e-9), sum(freedom)


def noise_limit(deviations: float, freedom: int) -> float:
    """How many standard errors are as rare, with an error of that many degrees of freedom, as so many standard
    deviations of a normal distribution are."""
    return t_quantile(freedom, 2 * NormalDist().cdf(deviations) - 1)


def reward_jump(moment: Moment) -> Finding | None:
    """The mean reward jumps within one step further than a policy can learn: the verifier has changed, or the data."""
    if (found := moment.compared(REWARD)) is None:
        return None
    (reward, _), before = found, moment.before(REWARD)
    last = before[-COMPARED:]
    error, freedom = step_error(moment, before)
    error *= (1 + 1 / len(last)) ** 0.5
    change = reward - float(last.mean())
    rewards = moment.batch.need("rewards")
    span = max(float(rewards.max() - rewards.min()), float(before.max() - before.min()), 1e-9)
    least = max(moment.knobs.reward_jump * span, noise_limit(moment.knobs.jump_noise, freedom) * error)
    if abs(change) < least:
        return None
    culprits = moment.responses_by(rewards, descending=change > 0)
    return Finding(
        f"The mean reward jumped from {float(last.mean()):.3f} to {reward:.3f} in one step, "
        f"{abs(change) / error:.1f} standard errors: was the verifier, its sign or the data changed? "
        f"{'Paid' if change > 0 else 'Not paid'}: {named(culprits)}.",
        sure(abs(change), least),
        {"reward": reward, "before": float(last.mean())},
        culprits,
    )


def parts_of(moment: Moment) -> list[str]:
    """Metrics of the reward's parts: ours, and TRL's mean of each reward function."""
    ours = [name for name in moment.metrics if name.startswith("reward_part/")]
    return ours + [n for n in moment.metrics if n.startswith("trl/rewards/") and n.endswith("/mean")]


def reward_parts(moment: Moment) -> Finding | None:
    """Format learnt instead of the task: one part of the reward rises while another falls."""
    changes: dict[str, float] = {}
    for name in parts_of(moment):
        values = np.array([*moment.before(name), moment.metrics[name]])
        if len(values) < 2 * moment.knobs.warmup_steps:
            return None
        third = len(values) // 3
        noise = float(values[-third:].std() + values[:third].std()) / 2 / third**0.5
        change = float(values[-third:].mean() - values[:third].mean())
        changes[name] = change if abs(change) > 3 * noise else 0.0
    if len(changes) < 2:
        return None
    up, down = max(changes, key=lambda n: changes[n]), min(changes, key=lambda n: changes[n])
    if changes[up] < moment.knobs.part_rise or changes[down] > -moment.knobs.part_fall:
        return None
    return Finding(
        f"One part of the reward is learnt at the cost of another: {up} rose by {changes[up]:.2f} while {down} "
        f"fell by {-changes[down]:.2f}. Weigh it down, or give it only to right answers.",
        sure(-changes[down], moment.knobs.part_fall),
        {up: changes[up], down: changes[down]},
    )


def constant_groups(moment: Moment) -> Finding | None:
    """Groups with one constant reward: too easy, too hard, or all the same response."""
    share, knobs = moment.now(CONSTANT), moment.knobs
    recent = [*moment.before(CONSTANT)[-2:], share or 0.0]
    if share is None or len(recent) < 3 or min(recent) < knobs.constant_groups:
        return None
    reward, same = moment.metrics.get(REWARD, 0.0), moment.metrics.get(SAME, 0.0)
    rewards = moment.batch.need("rewards")
    differ = float(rewards.max()) > float(rewards.min())
    right = float((rewards >= rewards.max()).float().mean()) if differ else reward
    why = "the task has become too easy" if right > 0.5 else "the task is too hard for the policy"
    usual = moment.before(SAME)[: knobs.warmup_steps]
    if len(usual) == knobs.warmup_steps and same > 0.5 + 0.5 * float(np.median(usual)):
        why = "siblings are copies of each other: sampling has lost its diversity (temperature?)"
    return Finding(
        f"{share:.0%} of the groups have one constant reward and teach nothing, in the third step running: {why}.",
        sure(share, knobs.constant_groups),
        {"constant": share, "identical_siblings": same, "reward": reward},
    )


def validation_falls(moment: Moment) -> Finding | None:
    """The training reward rises while validation falls: what is learnt is not the task."""
    names = [name for name in moment.metrics if name.startswith(("val-core/", "val/")) and "mean" in name]
    reward = moment.now(REWARD)
    for name in names:
        rows = [row for row in moment.history if isinstance(row.get(name), int | float)]
        if not rows or reward is None:
            continue
        best = max(rows, key=lambda row: row[name])
        fall = float(best[name]) - float(moment.metrics[name])
        then = _around(moment, best)
        if fall < moment.knobs.validation_fall or reward - then < -0.5 * moment.knobs.validation_fall:
            continue
        return Finding(
            f"Validation fell from {best[name]:.3f} to {moment.metrics[name]:.3f} ({name}) while the training reward "
            f"went from {then:.3f} to {reward:.3f}: the policy learns what pays, and that is no longer the task.",
            sure(fall, moment.knobs.validation_fall),
            {"validation": float(moment.metrics[name]), "best": float(best[name]), "reward": reward},
        )
    return None


def _around(moment: Moment, row: Mapping[str, float]) -> float:
    """The training reward when that validation was made: of that step, or of the one after it."""
    later = moment.history[moment.history.index(row) :]
    return next(float(one[REWARD]) for one in [*later, moment.metrics] if REWARD in one)


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


def reward_hacking(moment: Moment) -> Finding | None:
    """Reward hacking: among accepted responses, a cluster of like gradients over many prompts, odd and growing.

    A right answer's gradient is about its own prompt. A trick that pays everywhere has one gradient everywhere:
    responses that use it resemble each other across prompts, and other accepted responses do not. So the gradients of
    the accepted responses of the last steps (the sketches of the blame trace, each scaled to length 1) are split along
    their first principal component; its tighter end, over prompts, is the cluster. Where nothing is hacked, that
    component explains little and neither end is tight.
    """
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


def telling_tokens(moment: Moment, found: Cluster) -> list[Named]:
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
        Named(moment.decode([token for token in pair if token >= 0]), share=weights[pair])
        for pair in best
        if weights[pair] > 0
    ]
