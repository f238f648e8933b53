"""Sampling in bfloat16 from weights that are trained in float32: on a CPU what GPUs do with vLLM beside a trainer."""

from __future__ import annotations

import copy
from typing import Any

import torch

from gradtrace.rollout.sampler import Responses, Sampler


class HalfPrecisionSampler(Sampler):
    """Samples from a bfloat16 copy of the model, brought up to date before every call."""

    def __init__(self, model: Any, *settings: Any) -> None:
        super().__init__(copy.deepcopy(model).to(torch.bfloat16), *settings)
        self.trained = model

    @torch.no_grad()
    def respond(self, *starts: Any, **options: Any) -> Responses:
        for own, trained in zip(self.model.parameters(), self.trained.parameters(), strict=True):
            own.copy_(trained)
        return super().respond(*starts, **options)
