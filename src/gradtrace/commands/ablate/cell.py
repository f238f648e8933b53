"""One cell: a training pass over the shared rollout with these settings, and no step at its end."""

from __future__ import annotations

import dataclasses
import io
import json
import statistics
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch

from gradtrace.attribution.collectives import Ranks
from gradtrace.batch import RolloutBatch
from gradtrace.config.root import Config
from gradtrace.instruments.contract import OptimizerStep
from gradtrace.instruments.influence import INFLUENCE_TRACE
from gradtrace.instruments.influence.columns import parts_columns
from gradtrace.instruments.influence.factor_columns import influence_columns
from gradtrace.instruments.influence.observer import influence_observer
from gradtrace.instruments.influence.plan import StepPlan, status_by_advantage, status_by_contrast
from gradtrace.instruments.observers import Observers
from gradtrace.policy.loss import PolicyLoss
from gradtrace.policy.microbatch import MicroBatches
from gradtrace.policy.optimizer import Optimizer
from gradtrace.terminal import peak_bytes
from gradtrace.trace.columns import INFLUENCE_SCORES
from gradtrace.training.components import Components
from gradtrace.training.host import EmbeddedHost, loss_traits
from gradtrace.training.update import PolicyUpdate

KEPT = ("row", "length", "captured", *INFLUENCE_SCORES)


class TrainingPass:
    """Forward and backward of the configured loss over the whole rollout, as one mini-batch, and no step at its end."""

    def __init__(self, components: Components, batch: RolloutBatch, config: Config) -> None:
        self.batch = batch
        self.settings = config.trainer.influence_trace
        unclipped = dataclasses.replace(config.actor.optim, grad_clip=0.0)
        optimizer = Optimizer(components.policy.trainable(), unclipped, total_steps=1)
        loss = PolicyLoss(components.policy, config.algorithm, config.rollout.max_new_tokens)
        self.update = PolicyUpdate(loss, optimizer, moves=False)
        self.updates = [OptimizerStep(step=1, epoch=0, mini_batch=0, number=0, rows=torch.arange(len(batch)))]
        self.micro_batches = MicroBatches(batch, config.actor.token_budget)
        self.host = EmbeddedHost(
            components.policy,
            components.optimizer,
            loss_traits(config.algorithm),
            token_budget=config.actor.token_budget,
        )
        self.columns: dict[str, Any] = {}
        """What the influence trace would have written of the last traced pass."""

    @cached_property
    def observers(self) -> Observers:
        observer = influence_observer(self.host, self.settings)
        return Observers(Ranks(), {INFLUENCE_TRACE: observer}, raising=[INFLUENCE_TRACE])

    def run(self) -> None:
        self.update.run(self.batch, self.micro_batches, self.updates)

    def run_traced(self) -> None:
        settings = self.settings
        threshold = settings.accepted_threshold
        if settings.is_parts:
            status = status_by_advantage(self.batch)
        else:
            status = status_by_contrast(self.batch, settings.max_prompts_per_step, threshold)
        plan = StepPlan.of(self.batch, 1, status, threshold, verify=False)
        self.observers.begin({INFLUENCE_TRACE: plan})
        batch, _ = self.update.run(self.batch, self.micro_batches, self.updates, self.observers, self.host)
        table = self.observers.end()[INFLUENCE_TRACE]
        if settings.is_parts:
            rows, columns, _ = parts_columns(batch, table, status, threshold, pairwise_max_mb=0)
        else:
            rows, columns, _ = influence_columns(batch, table, status, settings, pairwise_max_mb=0)
        self.columns = {"row": rows.numpy(), "length": batch.response_lengths[rows].numpy(), **columns}


def measure(work: TrainingPass, repeat: int, traced: bool) -> dict[str, Any]:
    """Seconds and peak memory of the pass; the first one, where memory is measured, is not timed. A traced pass is
    timed in turn with one without a trace: on a machine that others use too, only such neighbours compare."""

    def seconds(run: Callable[[], None]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    peak = peak_bytes(work.run_traced if traced else work.run, work.host.policy.device)
    rounds = [(seconds(work.run), seconds(work.run_traced) if traced else 0.0) for _ in range(repeat)]
    timed = [own if traced else plain for plain, own in rounds]
    costs = {"time_s": statistics.median(timed), "time_s_all": timed, "peak_bytes": peak}
    return costs | ({"overhead": statistics.median(own / plain for plain, own in rounds)} if traced else {})


def score_cell(components: Components, batch: RolloutBatch, config: Config, repeat: int) -> bytes:
    """The cell's file: scores of the tokens, and what they cost."""
    work = TrainingPass(components, batch, config)
    costs = measure(work, repeat, traced=True)
    columns: dict[str, Any] = {name: np.asarray(work.columns[name]) for name in KEPT if name in work.columns}
    meta = costs | {"output_function": work.settings.output_function}
    buffer = io.BytesIO()
    np.savez(buffer, meta_json=np.frombuffer(json.dumps(meta).encode(), np.uint8), **columns)
    return buffer.getvalue()
