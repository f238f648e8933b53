"""The driver's side of the entropy probe, without verl: which E is sent, what a failure costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gradtrace.batch import RolloutBatch
from gradtrace.config import EntropyProbeConfig
from gradtrace.errors import GradtraceError
from gradtrace.instruments.entropy_probe.columns import ProbeRecord
from gradtrace.integrations.verl.driver.recorder import ProbeRecorder, without_prompts
from gradtrace.integrations.verl.parts import ProbePart
from gradtrace.trace.reader import open_run
from gradtrace.trace.schema import ENTROPY_PROBE
from gradtrace.trace.writer import TraceWriter
from tests.training import small


class Sampler:
    def __init__(self, answer: RolloutBatch | Exception) -> None:
        self.answer = answer

    def sample(self, step: int) -> RolloutBatch:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def recorder(folder: Path, sampler: Any, on_error: str = "warn") -> tuple[ProbeRecorder, list[str]]:
    said: list[str] = []
    settings = EntropyProbeConfig(every=2, on_error=on_error)
    writer = TraceWriter(folder, ENTROPY_PROBE)
    record = ProbeRecord(settings, writer, {"task": "x"}, report=said.append)
    found = ProbeRecorder(record, folder / ENTROPY_PROBE / "parts", 2)
    found.sampler = sampler
    return found, said


def update() -> RolloutBatch:
    batch = small.random_batch(groups=2, n=2, seed=1)
    lengths = batch.response_mask.shape
    return batch.replace(
        old_log_probs=-torch.rand(lengths), entropies=torch.rand(lengths), rewards=torch.rand(len(batch))
    )


def numbers(batch: RolloutBatch, rows: range, seed: int) -> dict[int, torch.Tensor]:
    """float64[2, t] for these sequences."""
    generator = torch.Generator().manual_seed(seed)
    lengths = batch.response_lengths.tolist()
    return {row: torch.rand(2, lengths[row], generator=generator, dtype=torch.float64) for row in rows}


def test_e_has_no_prompt_of_the_rollout_and_no_empty_response() -> None:
    batch = small.random_batch(groups=4, n=2, seed=2)
    mask = batch.response_mask.clone()
    mask[2:4] = False  # the second prompt has no answer
    kept = without_prompts(batch.replace(response_mask=mask), [batch.prompts[3]])
    assert kept.prompts == [batch.prompts[0], batch.prompts[2]]
    assert kept.group.tolist() == [0, 0, 1, 1]


def test_parts_of_all_ranks_make_one_file(tmp_path: Path) -> None:
    batch, evaluation = update(), small.random_batch(groups=4, n=1, seed=3)
    probe, _ = recorder(tmp_path, Sampler(evaluation))
    probe.sample(2)
    inputs = probe.inputs(batch, 2)
    assert inputs is not None and inputs.prompts == evaluation.prompts
    rows = torch.tensor([0, 1, 3])
    for rank, (mine, own) in enumerate(((range(2), [1]), (range(2, 4), [0, 3]))):
        part = ProbePart(
            *(numbers(evaluation, mine, seed) for seed in range(3)),
            shares={row: torch.full((int(batch.response_lengths[row]),), float(row)) for row in own},
            momentum=0.5,
            seconds=1.0 + rank,
        )
        part.write(Path(inputs.parts_dir), 2, rank)
    metrics = probe.record(batch, rows, 2)
    probe.on_disk.writer.close()
    step = open_run(tmp_path).step(ENTROPY_PROBE, 2)
    lengths = batch.response_lengths[rows]
    assert step["share"][:3].tolist() == (lengths * rows).tolist() and step["row"][:3].tolist() == [0, 1, 3]
    assert metrics["entropy_probe/momentum_share"] == 0.5 and metrics["timing_s/entropy_probe"] == 2.0
    assert metrics["entropy_probe/delta_h_predicted"] == pytest.approx(step.meta["delta_h_predicted"])
    assert not list(Path(inputs.parts_dir).iterdir())
    assert probe.record(batch, rows, 3) == {}


@pytest.mark.parametrize("cause", ["sampling", "prompts", "rank"])
def test_a_failure_costs_one_probe_or_with_raise_the_run(tmp_path: Path, cause: str) -> None:
    batch, evaluation = update(), small.random_batch(groups=3, n=1, seed=3)
    answer: Any = RuntimeError("no replica") if cause == "sampling" else evaluation
    if cause == "prompts":
        batch = batch.replace(prompts=evaluation.prompts[:2])

    def probe_once(probe: ProbeRecorder) -> dict[str, float]:
        probe.sample(2)
        inputs = probe.inputs(batch, 2)
        if inputs is not None:
            for rank in range(2):
                ProbePart(failure="not finite" * rank).write(Path(inputs.parts_dir), 2, rank)
        return probe.record(batch, torch.tensor([0]), 2)

    probe, said = recorder(tmp_path, Sampler(answer))
    assert probe_once(probe) == {"entropy_probe/errors": 1.0}
    assert len(said) == 1 and "step 2 is not probed" in said[0]
    strict, _ = recorder(tmp_path, Sampler(answer), "raise")
    with pytest.raises(GradtraceError, match="step 2 is not probed"):
        probe_once(strict)
