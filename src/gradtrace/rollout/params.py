"""How responses are sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from gradtrace.errors import GradtraceError

EVERY_TOKEN: dict[str, Any] = {"top_p": 1.0, "top_k": 0}
"""Settings that sample from the full distribution."""


@dataclass(frozen=True)
class SamplingParams:
    """How many responses, how long, and from which distribution; see `gradtrace.rollout.draw` for the latter."""

    n: int = 1
    """Responses per prompt."""
    max_new_tokens: int = 64
    """A response that has no stop token by then ends there, unfinished."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most likely token always."""
    top_p: float = 1.0
    """Sample from the fewest most likely tokens that together hold this probability; 1 = from all."""
    top_k: int = 0
    """Sample from this many most likely tokens; 0 = from all."""
    stop_token_ids: tuple[int, ...] = ()
    """A response ends with the first of these; it is part of the response."""

    @staticmethod
    def of(settings: Any, stop_token_ids: tuple[int, ...], **changes: Any) -> SamplingParams:
        """Read a section of a configuration that has fields of these names (`rollout`, say), with `changes`."""
        names = [field.name for field in fields(SamplingParams)]
        shared = {name: getattr(settings, name) for name in names if hasattr(settings, name)}
        return SamplingParams(**{**shared, "stop_token_ids": stop_token_ids, **changes})

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        problems = {
            f"n={self.n} (at least 1)": self.n < 1,
            f"max_new_tokens={self.max_new_tokens} (at least 1)": self.max_new_tokens < 1,
            f"temperature={self.temperature} (0 = greedy, or a positive number)": not (
                math.isfinite(self.temperature) and self.temperature >= 0
            ),
            f"top_p={self.top_p} (above 0, at most 1)": not 0 < self.top_p <= 1,
            f"top_k={self.top_k} (0 = off, or a positive number)": self.top_k < 0,
        }
        wrong = [problem for problem, found in problems.items() if found]
        if wrong:
            raise GradtraceError("sampling parameters out of range: " + "; ".join(wrong))
