"""Format learnt instead of the task: one part of the reward rises while another falls or stands still at nothing."""

from __future__ import annotations

import numpy as np

from gradtrace.instruments.findings.base import Finding, Moment, sure


def parts_of(moment: Moment) -> list[str]:
    """Metrics of the reward's parts: ours, and TRL's mean of each reward function."""
    ours = [name for name in moment.metrics if name.startswith("reward_part/")]
    return ours + [n for n in moment.metrics if n.startswith("trl/rewards/") and n.endswith("/mean")]


def detect(moment: Moment) -> Finding | None:
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
