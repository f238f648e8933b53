"""The mean reward jumps within one step further than a policy can learn: the verifier has changed, or the data."""

from __future__ import annotations

from gradtrace.instruments.findings.base import Finding, Moment, named, sure

NAME = "critic/rewards/mean"


def detect(moment: Moment) -> Finding | None:
    reward, usual = moment.now(NAME), moment.usual(NAME)
    if reward is None or usual is None:
        return None
    before = moment.before(NAME)
    last, step = before[-3:], abs(before[1:] - before[:-1])
    noise = max(float(step.mean()) if len(step) else 0.0, 1e-6)
    change = reward - float(last.mean())
    rewards = moment.batch.need("rewards")
    span = max(float(rewards.max() - rewards.min()), float(before.max() - before.min()), 1e-9)
    if abs(change) < max(moment.knobs.reward_jump * span, moment.knobs.jump_noise * noise):
        return None
    rows = rewards.argsort(descending=change > 0)[:3].tolist()
    culprits = [moment.response(row) for row in rows]
    return Finding(
        f"The mean reward jumped from {float(last.mean()):.3f} to {reward:.3f} in one step, "
        f"{abs(change) / noise:.0f} times its "
        f"usual step: was the verifier, its sign or the data changed? {'Paid' if change > 0 else 'Not paid'}: "
        f"{named(culprits)}.",
        sure(abs(change), max(moment.knobs.reward_jump * span, moment.knobs.jump_noise * noise)),
        {"reward": reward, "before": float(last.mean())},
        culprits,
    )
