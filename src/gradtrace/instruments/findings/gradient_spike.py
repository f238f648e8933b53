"""A gradient far larger than usual, or one that is not finite: which tokens made it."""

from __future__ import annotations

import math

from gradtrace.instruments.findings.base import Finding, Moment, named, sure

NAMES = ("blame/largest_grad_norm", "actor/grad_norm")


def detect(moment: Moment) -> Finding | None:
    if moment.metrics.get("actor/skipped_updates", 0.0) > 0:
        culprits = moment.blamed()
        sentence = f"A gradient was not finite and its update was skipped; by {named(culprits)}."
        return Finding(sentence, 1.0, {"skipped": moment.metrics["actor/skipped_updates"]}, culprits)
    norm, usual = moment.now(*NAMES), moment.usual(*NAMES)
    if norm is None or usual is None:
        return None
    typical, largest = usual[0], float(moment.before(*NAMES).max())
    ratio = norm / max(typical, 1e-12)
    if math.isfinite(norm) and (ratio < moment.knobs.spike_ratio or norm < 1.5 * largest):
        return None
    culprits = moment.blamed()
    return Finding(
        f"The gradient norm jumped to {norm:.3g}, {ratio:.0f} times its usual {typical:.3g}; most of it by "
        f"{named(culprits)}.",
        sure(ratio, moment.knobs.spike_ratio),
        {"grad_norm": norm, "usual": typical},
        culprits,
    )
