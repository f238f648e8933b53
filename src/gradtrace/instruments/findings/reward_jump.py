"""The mean reward jumps within one step further than a policy can learn: the verifier has changed, or the data."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import torch

from gradtrace.instruments.findings.base import Finding, Moment, named, sure
from gradtrace.intervals import t_quantile

NAME = "critic/rewards/mean"
COMPARED = 5
"""Steps whose mean the new one is held against."""


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


def detect(moment: Moment) -> Finding | None:
    reward, usual = moment.now(NAME), moment.usual(NAME)
    if reward is None or usual is None:
        return None
    before = moment.before(NAME)
    last = before[-COMPARED:]
    error, freedom = step_error(moment, before)
    error *= (1 + 1 / len(last)) ** 0.5
    change = reward - float(last.mean())
    rewards = moment.batch.need("rewards")
    span = max(float(rewards.max() - rewards.min()), float(before.max() - before.min()), 1e-9)
    least = max(moment.knobs.reward_jump * span, noise_limit(moment.knobs.jump_noise, freedom) * error)
    if abs(change) < least:
        return None
    rows = rewards.argsort(descending=change > 0)[:3].tolist()
    culprits = [moment.response(row) for row in rows]
    return Finding(
        f"The mean reward jumped from {float(last.mean()):.3f} to {reward:.3f} in one step, "
        f"{abs(change) / error:.1f} standard errors: was the verifier, its sign or the data changed? "
        f"{'Paid' if change > 0 else 'Not paid'}: {named(culprits)}.",
        sure(abs(change), least),
        {"reward": reward, "before": float(last.mean())},
        culprits,
    )
