"""Who wrote which part of a response of several turns. Readers of traces need it, so it does without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """A stretch of a response that one author wrote; it ends where the next begins."""

    start: int
    """Index of its first token in the response."""
    turn: int
    """The policy's turn that it belongs to, from 0: a tool's result has the turn of the call that asked for it."""
    role: str
    """assistant (the policy), tool, user, or environment where the author is not known."""
    tool: str = ""
    """Name of the tool, where a tool wrote it."""


def segments_by_mask(written: list[bool]) -> list[Segment]:
    """The segments of a response of which only its mask is known: what the policy wrote, and what it did not."""
    found: list[Segment] = []
    turn = -1
    for start, own in enumerate(written):
        if start and own == written[start - 1]:
            continue
        turn += own
        found.append(Segment(start, max(turn, 0), "assistant" if own else "environment"))
    return found
