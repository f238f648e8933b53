"""Times and numbers of a training step, under the names that users know from verl."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator

from torch import Tensor

from gradtrace.batch import RolloutBatch

GENERATED = "perf/generated_responses"
"""Responses sampled in a step, whatever for (evaluation on `trainer.validation` left out). An instrument that samples,
such as TracIn its validation set, reports its own under the same name, and the counts are added up."""
UNTRACED = "influence_trace/debug_untraced_rollouts"
"""Rollouts of the run so far of which no instrument has a trace."""
TRAINED = "perf/trained_responses"
"""Responses that the update of a step used."""


class Timer:
    """`with timer("gen"): …` adds up seconds under timing_s/gen."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.seconds: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - begin

    @property
    def total(self) -> float:
        return time.perf_counter() - self.start

    def metrics(self) -> dict[str, float]:
        return {f"timing_s/{name}": value for name, value in self.seconds.items()} | {"timing_s/step": self.total}


def spread(name: str, values: Tensor) -> dict[str, float]:
    values = values.float()
    return {f"{name}/{how}": float(getattr(values, how)()) for how in ("mean", "max", "min")}


def batch_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Rewards, advantages and lengths of the batch that was trained on."""
    prompt_lengths = batch.prompt_lengths.float()
    return {
        **spread("critic/rewards", batch.need("rewards")),
        **spread("critic/advantages", batch.need("advantages")[batch.response_mask]),
        **spread("response_length", batch.response_lengths),
        "response_length/clip_ratio": float((~batch.finished).float().mean()),
        TRAINED: float(len(batch) if batch.kept is None else batch.kept.sum()),
        "prompt_length/mean": float(prompt_lengths.mean()),
        "prompt_length/max": float(prompt_lengths.max()),
    }
