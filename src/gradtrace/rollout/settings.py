"""How responses are sampled: the settings of a run, and the parameters of one call."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from gradtrace.attribution.config import choice, number
from gradtrace.errors import GradtraceError

EVERY_TOKEN: dict[str, Any] = {"top_p": 1.0, "top_k": 0}
"""Settings that sample from the full distribution."""


@dataclass
class RolloutConfig:
    n: int = number(8, minimum=1)
    """Responses per prompt: the size of a group."""
    max_new_tokens: int = number(32, minimum=1)
    """Longest response, stop token and what tools wrote included."""
    temperature: float = number(1.0, minimum=0)
    """Log-probs and entropies of training are taken at this temperature too."""
    top_p: float = number(1.0, minimum=0, maximum=1)
    """Nucleus sampling; 1 is off. Below 1 the policy that is trained is not the one that sampled."""
    top_k: int = number(0, minimum=0)
    """Sample among the k likeliest tokens; 0 is off."""
    max_turns: int = number(1, minimum=1)
    """Turns of the policy in a response: after a call the task's tool replies, and the policy goes on. The replies
    count in max_new_tokens. 1: no calls."""
    precision: str = choice("float32", "bfloat16")
    """What the embedded loop's sampler computes in. `bfloat16`: from a rounded copy of the weights, as rollout engines
    on GPUs do; then its log-probs are not the trainer's (docs/mismatch.md)."""
    engine: str = choice("embedded", "vllm")
    """Who writes the responses: our sampler, or vLLM in this process on the same GPU (docs/gpu.md)."""
    compile: bool = False
    """Decode with a compiled model of fixed shapes: CUDA graphs on a GPU, where a small model waits for the host
    otherwise. Compiling takes a minute or so per shape."""
    max_batch_tokens: int = number(32768, minimum=1)
    """Responses × (prompt + response) tokens in the key-value cache at once; the rest waits its turn."""

    def validate(self, path: str) -> None:
        if self.temperature == 0:
            raise GradtraceError(
                f"{path}temperature=0 samples the same response n times: nothing to learn from. Use 1."
            )
        if self.engine == "vllm" and (self.compile or self.precision != "float32"):
            raise GradtraceError(
                f"{path}compile and {path}precision are the embedded sampler's: leave them out with {path}engine=vllm, "
                "which compiles its own model in bfloat16."
            )


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
