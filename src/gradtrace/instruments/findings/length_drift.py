"""Responses that grow or shrink steadily, and whether the reward pays for their length."""

from __future__ import annotations

from gradtrace.instruments.findings.base import Finding, Moment, named, sure

NAME, PAYS = "response_length/mean", "batch/reward_length_correlation"


def detect(moment: Moment) -> Finding | None:
    length, usual = moment.now(NAME), moment.usual(NAME)
    if length is None or usual is None:
        return None
    first = float(moment.before(NAME)[: moment.knobs.warmup_steps].mean())
    change, pays = length / max(first, 1e-9) - 1.0, moment.now(PAYS)
    earlier = moment.before(PAYS)
    paid = pays is not None and len(earlier) >= 2 and min(pays, *earlier[-2:]) > moment.knobs.length_pays
    was_paid = len(earlier) >= moment.knobs.warmup_steps and float(earlier[: moment.knobs.warmup_steps].mean()) > 0.3
    drifts = abs(change) > moment.knobs.length_drift
    if not drifts and not (paid and not was_paid):
        return None
    rows = moment.batch.response_lengths.argsort(descending=change > 0)[:3].tolist()
    culprits = [moment.response(row) for row in rows]
    why = f" The reward pays for length (correlation within groups {pays:.2f})." if paid else ""
    value, threshold = (change, moment.knobs.length_drift) if drifts else (pays or 0.0, moment.knobs.length_pays)
    return Finding(
        f"Responses {'grow' if change > 0 else 'shrink'}: {length:.1f} tokens, {first:.1f} at first "
        f"({change:+.0%}).{why} The {'longest' if change > 0 else 'shortest'}: {named(culprits)}.",
        sure(abs(value), threshold),
        {"length": length, "at_first": first, "reward_length_correlation": pays if pays is not None else 0.0},
        culprits,
    )
