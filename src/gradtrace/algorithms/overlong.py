"""DAPO's soft overlong penalty: a response near the length limit loses reward gradually."""

from __future__ import annotations

from torch import Tensor

from gradtrace.errors import GradtraceError


def soft_overlong_penalty(lengths: Tensor, max_length: int, buffer: int, penalty: float = 1.0) -> Tensor:
    """float[R] ≤ 0, to be *added* to the rewards; lengths long[R] count response tokens.

    Zero up to max_length − buffer tokens, then falling linearly to −penalty at max_length, and no further.
    """
    if not 0 < buffer <= max_length:
        raise GradtraceError(
            f"The overlong buffer is {buffer} tokens and the length limit {max_length}: the buffer is the "
            "last part of the allowed length, so it must be at least 1 and at most the limit."
        )
    excess = lengths - (max_length - buffer)
    return -penalty * (excess / buffer).clamp(0.0, 1.0)
