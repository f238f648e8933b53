"""Finished responses whose end token is not among the trained tokens: the policy never learns to stop."""

from __future__ import annotations

from gradtrace.instruments.findings.base import Finding, Moment, sure

NAME = "batch/ends_like_a_middle"


def detect(moment: Moment) -> Finding | None:
    share = moment.now(NAME)
    if share is None or share < moment.knobs.end_untrained:
        return None
    rows = moment.batch.finished.nonzero().flatten()[:3].tolist()
    lengths = moment.batch.response_lengths
    culprits = [moment.token(row, int(lengths[row]) - 1) for row in rows]
    shown = ", ".join(repr(culprit.text) for culprit in culprits)
    return Finding(
        f"{share:.0%} of the finished responses end, as far as training sees them, with a token that also "
        f"stands in the middle of responses ({shown}): their end token is masked, so the policy never learns to stop.",
        sure(share, moment.knobs.end_untrained),
        {"share": share},
        culprits,
    )
