"""How many responses a step sampled and trained on: what sample efficiency is measured by."""

from __future__ import annotations

from pathlib import Path

import torch

from gradtrace.batch import RolloutBatch
from gradtrace.instruments.contract import Reporter, Table
from tests.training import small

BATCH = 4 * 3


class DropsTwo(Reporter):
    def plan(self, batch: RolloutBatch, step: int, sampled: RolloutBatch | None) -> tuple[RolloutBatch, None]:
        kept = torch.ones(len(batch), dtype=torch.bool)
        kept[:2] = False
        return batch.replace(kept=kept), None


class Samples(Reporter):
    def write(self, batch: RolloutBatch, step: int, table: Table | None) -> dict[str, float]:
        return {"perf/generated_responses": 5.0}


def counts(folder: Path, *reporters: Reporter) -> list[tuple[float, float]]:
    run = small.trainer(folder, "trainer.total_steps=2")
    for number, reporter in enumerate(reporters):
        run.steps.add(f"mine {number}", reporter)
    run.fit()
    lines = [line for line in small.metrics(run.files.path, timings=True) if line["step"] > 0]
    return [(line["perf/trained_responses"], line["perf/generated_responses"]) for line in lines]


def test_without_selection_every_sampled_response_is_trained_on(tmp_path: Path) -> None:
    assert counts(tmp_path) == [(BATCH, BATCH)] * 2


def test_dropped_responses_are_generated_and_not_trained_on(tmp_path: Path) -> None:
    assert counts(tmp_path, DropsTwo()) == [(BATCH - 2, BATCH)] * 2


def test_what_instruments_sample_is_added_to_the_rollout(tmp_path: Path) -> None:
    assert counts(tmp_path, Samples(), Reporter(), Samples()) == [(BATCH, BATCH + 10)] * 2
