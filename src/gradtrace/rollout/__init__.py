"""The sampler of the embedded loop: prompts in, a `RolloutBatch` of sampled responses out."""

from gradtrace.rollout.params import SamplingParams
from gradtrace.rollout.sampler import Sampler

__all__ = ["Sampler", "SamplingParams"]
