"""Entropy that collapses at once or without the reward to show for it, or explodes: which tokens, and since when."""

from __future__ import annotations

import numpy as np

from gradtrace.instruments.findings.base import Finding, Moment, named, sure

NAME = "actor/entropy"


def detect(moment: Moment) -> Finding | None:
    entropy = moment.now(NAME)
    series = np.array([*moment.before(NAME), entropy if entropy is not None else np.nan])
    first = series[: moment.knobs.warmup_steps]
    if entropy is None or len(series) <= moment.knobs.warmup_steps:
        return None
    begin, recent = float(np.median(first)), float(np.median(series[-2:]))
    evidence = {"entropy": entropy, "at_first": begin}
    predicted = moment.now("entropy_probe/delta_h_predicted")
    if predicted is not None:
        evidence["predicted_change"] = predicted
    if recent > moment.knobs.entropy_explosion * max(begin, 1e-3):
        culprits = moment.tokens_by(moment.batch.entropies) if moment.batch.entropies is not None else []
        since = _since(moment, series, begin * moment.knobs.entropy_explosion**0.5, above=True)
        return Finding(
            f"Entropy explodes: {entropy:.3f} nats per token, {begin:.3f} at first, since step {since}; the "
            f"policy becomes noise. Least sure: {named(culprits)}.",
            sure(recent, moment.knobs.entropy_explosion * begin),
            evidence,
            culprits,
        )
    falls = recent < moment.knobs.entropy_collapse * begin
    soon = predicted is not None and predicted < 0 and entropy + 5 * predicted < moment.knobs.entropy_collapse * begin
    if not (falls or (soon and recent < 0.7 * begin)):
        return None
    plunges = recent < moment.knobs.entropy_plunge * float(np.median(series[-6:-2]))
    if _is_learning(moment) and not plunges:
        return None
    culprits = moment.vocabulary(moment.blame.of_the_step().share) if moment.blame is not None else []
    what = "collapsed" if falls else "is about to collapse, says the probe"
    but = (
        "within a few steps, faster than anything is learnt: is the learning rate too high?"
        if plunges
        else "and the reward has not risen with it: the policy stops exploring."
    )
    return Finding(
        f"Entropy {what}: {entropy:.3f} nats per token, {begin:.3f} at first, since step "
        f"{_since(moment, series, 0.5 * (begin + recent), above=False)}, {but}"
        + (f" The update is mostly about {named(culprits)}." if culprits else ""),
        sure(moment.knobs.entropy_collapse * begin, max(recent, 1e-6)),
        evidence,
        culprits,
    )


def _is_learning(moment: Moment) -> bool:
    """Entropy that falls while the reward rises is what learning looks like."""
    rewards = [*moment.before("critic/rewards/mean"), moment.now("critic/rewards/mean") or 0.0]
    third = max(2, len(rewards) // 3)
    return float(np.mean(rewards[-third:])) > float(np.mean(rewards[:third])) + moment.knobs.reward_gain


def _since(moment: Moment, series: np.ndarray, level: float, above: bool) -> int:
    """The first step of the latest stretch beyond the level."""
    beyond = series > level if above else series < level
    stretch = len(beyond) - (np.flatnonzero(~beyond)[-1] + 1 if not beyond.all() else 0)
    return moment.step - max(int(stretch), 1) + 1
