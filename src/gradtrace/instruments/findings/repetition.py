"""Responses that repeat themselves, or are cut at the length limit."""

from __future__ import annotations

from gradtrace.instruments.findings.base import Finding, Moment, named, sure
from gradtrace.instruments.findings.statistics import repeated_share

REPEATED, CUT = "batch/repetition", "response_length/clip_ratio"


def detect(moment: Moment) -> Finding | None:
    for name, limit in ((REPEATED, moment.knobs.repeated), (CUT, moment.knobs.cut)):
        value, usual = moment.now(name), moment.usual(name)
        if value is None or usual is None or value < usual[0] + limit:
            continue
        if name == CUT:
            rows = (~moment.batch.finished).nonzero().flatten()[:3].tolist()
            sentence = f"{value:.0%} of the responses are cut at the length limit ({usual[0]:.0%} before)"
        else:
            rows = repeated_share(moment.batch).argsort(descending=True)[:3].tolist()
            sentence = f"Responses repeat themselves: {value:.0%} of their tokens are in loops ({usual[0]:.0%} before)"
        culprits = [moment.response(row) for row in rows]
        evidence = {"share": value, "usual": usual[0]}
        return Finding(f"{sentence}: {named(culprits)}.", sure(value - usual[0], limit), evidence, culprits)
    return None
