"""The sampler of the embedded loop: prompts in, a `RolloutBatch` of sampled responses out."""

from typing import TYPE_CHECKING, Any

from gradtrace.rollout.settings import SamplingParams

if TYPE_CHECKING:
    from gradtrace.rollout.sampler import Sampler

__all__ = ["Sampler", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Import `Sampler` on its first use: the settings of a run are read without torch."""
    if name != "Sampler":
        raise AttributeError(f"module 'gradtrace.rollout' has no attribute {name!r}")
    from gradtrace.rollout.sampler import Sampler

    return Sampler
