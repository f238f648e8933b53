"""One cell: a training pass over the shared rollout with these settings, and no step at its end."""

from __future__ import annotations

import io
import json
import statistics
import time
from typing import Any

import numpy as np
import torch

from gradtrace.batch import RolloutBatch
from gradtrace.config import Config
from gradtrace.instruments.influence.columns import influence_columns
from gradtrace.instruments.influence.instrument import InfluenceTraceInstrument
from gradtrace.instruments.influence.record import InfluenceRecord
from gradtrace.instruments.observer import OptimizerStep, StepObserver
from gradtrace.peak_memory import peak_bytes
from gradtrace.policy.loss import PolicyLoss
from gradtrace.policy.microbatch import MicroBatches
from gradtrace.policy.policy import Policy
from gradtrace.training.instruments import loss_traits
from gradtrace.training.parts import Parts
from gradtrace.training.update import PolicyUpdate

SCORES = ("influence_position", "influence_tail", "influence_loss_term")
KEPT = ("row", "length", "captured", *SCORES)


class FrozenOptimizer:
    """Gradients come and go; the weights stay."""

    def __init__(self, policy: Policy) -> None:
        self.parameters = list(policy.trainable().values())

    def clip(self) -> float:
        return 0.0

    def step(self) -> None: ...

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


class ScoreKeeper(InfluenceTraceInstrument):
    """The influence trace as in a run, with its columns kept instead of written."""

    def __init__(self, policy: Policy, optimizer: Any, config: Config) -> None:
        record = InfluenceRecord(config.trainer.influence_trace, writer=None)  # type: ignore[arg-type]
        super().__init__(policy, record, loss_traits(config.algorithm), optimizer)
        self.columns: dict[str, Any] = {}

    def after_update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        self.capture.drop_unscored()
        self.tracer.close()
        self.columns, _ = influence_columns(
            batch, self.capture.scored, self.capture.status, self.config, pairwise_max_mb=0
        )
        return {}


def training_pass(parts: Parts, batch: RolloutBatch, config: Config, observer: StepObserver) -> RolloutBatch:
    """Forward and backward of the configured loss over the whole rollout, as one mini-batch, watched by `observer`."""
    loss = PolicyLoss(parts.policy, config.algorithm, config.rollout.max_new_tokens)
    update = PolicyUpdate(loss, FrozenOptimizer(parts.policy))  # type: ignore[arg-type]
    step = OptimizerStep(step=1, epoch=0, mini_batch=0, number=0, rows=torch.arange(len(batch)))
    batch = observer.before_update(batch, 1)
    batch, _ = update.run(batch, MicroBatches(batch, config.actor.token_budget), [step], observer)
    return batch


def measure(
    parts: Parts, batch: RolloutBatch, config: Config, repeat: int, traced: bool
) -> tuple[dict[str, Any], ScoreKeeper | None]:
    """Seconds and peak memory of the pass; the first one, where memory is measured, is not timed. A traced pass is
    timed in turn with one without a trace: on a machine that others use too, only such neighbours compare."""
    keeper = ScoreKeeper(parts.policy, parts.optimizer.adamw, config) if traced else None

    def work(observer: StepObserver) -> float:
        start = time.perf_counter()
        done = training_pass(parts, batch, config, observer)
        observer.after_update(done, 1)
        return time.perf_counter() - start

    peak = peak_bytes(lambda: work(keeper or StepObserver()), parts.policy.device)
    seconds, plain = [], []
    for _ in range(repeat):
        plain.append(work(StepObserver()))
        if keeper is not None:
            seconds.append(work(keeper))
    timed = seconds if traced else plain
    costs = {"time_s": statistics.median(timed), "time_s_all": timed, "peak_bytes": peak}
    if traced:
        costs["overhead"] = statistics.median(a / b for a, b in zip(seconds, plain, strict=True))
    return costs, keeper


def score_cell(parts: Parts, batch: RolloutBatch, config: Config, repeat: int) -> bytes:
    """The cell's file: scores of the tokens, and what they cost."""
    costs, keeper = measure(parts, batch, config, repeat, traced=True)
    assert keeper is not None
    columns: dict[str, Any] = {name: np.asarray(keeper.columns[name]) for name in KEPT if name in keeper.columns}
    meta = costs | {
        "credit": config.trainer.influence_trace.credit,
        "output_function": keeper.config.output_function,
    }
    buffer = io.BytesIO()
    np.savez(buffer, meta_json=np.frombuffer(json.dumps(meta).encode(), np.uint8), **columns)
    return buffer.getvalue()
