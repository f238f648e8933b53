"""The mean reward jumps within one step further than a policy can learn: the verifier has changed, or the data."""

from __future__ import annotations

import numpy as np
import torch

from gradtrace.instruments.findings.base import Finding, Moment, named, sure

NAME = "critic/rewards/mean"
COMPARED = 5
"""Steps whose mean the new one is held against."""


def step_error(moment: Moment, before: np.ndarray) -> float:
    """Standard error of one step's mean reward: that of drawing its prompts, by how much their means differ, or that
    of its steps so far, whichever is larger. A few quiet steps alone would make it too small."""
    group, rewards = moment.batch.group, moment.batch.need("rewards").double()
    counts = torch.bincount(group)
    means = (torch.bincount(group, rewards) / counts)[counts > 0]
    drawn = float(means.std() / len(means) ** 0.5) if len(means) > 1 else 0.0
    return max(drawn, float(np.diff(before).std()) / 2**0.5, 1e-9)


def detect(moment: Moment) -> Finding | None:
    reward, usual = moment.now(NAME), moment.usual(NAME)
    if reward is None or usual is None:
        return None
    before = moment.before(NAME)
    last = before[-COMPARED:]
    error = step_error(moment, before) * (1 + 1 / len(last)) ** 0.5
    change = reward - float(last.mean())
    rewards = moment.batch.need("rewards")
    span = max(float(rewards.max() - rewards.min()), float(before.max() - before.min()), 1e-9)
    least = max(moment.knobs.reward_jump * span, moment.knobs.jump_noise * error)
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
