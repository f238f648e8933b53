"""Groups with one constant reward: too easy, too hard, or all the same response."""

from __future__ import annotations

import numpy as np

from gradtrace.instruments.findings.base import Finding, Moment, sure

NAME, SAME = "batch/constant_groups", "batch/identical_siblings"


def detect(moment: Moment) -> Finding | None:
    share, knobs = moment.now(NAME), moment.knobs
    recent = [*moment.before(NAME)[-2:], share or 0.0]
    if share is None or len(recent) < 3 or min(recent) < knobs.constant_groups:
        return None
    reward, same = moment.metrics.get("critic/rewards/mean", 0.0), moment.metrics.get(SAME, 0.0)
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
