"""So many tokens are clipped that the update hardly uses the batch."""

from __future__ import annotations

from gradtrace.instruments.findings.base import Finding, Moment, named, sure

NAME = "actor/pg_clipfrac"


def detect(moment: Moment) -> Finding | None:
    share, usual = moment.now(NAME), moment.usual(NAME)
    if share is None or usual is None or share < max(moment.knobs.clipped, 3 * usual[0]):
        return None
    culprits = moment.blamed()
    return Finding(
        f"{share:.0%} of the tokens are clipped (usually {usual[0]:.1%}): the policy moves too far within one "
        "rollout. Lower the learning rate, or make fewer optimizer steps per rollout. Most of the gradient: "
        f"{named(culprits)}.",
        sure(share, max(moment.knobs.clipped, 3 * usual[0])),
        {"clipped": share, "usual": usual[0]},
        culprits,
    )
