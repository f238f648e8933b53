"""The driver's side of an instrument that samples, without verl: the entropy probe's E, and what a failure costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gradtrace import open_run
from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.instruments.contract import Samples, Table
from gradtrace.instruments.entropy_probe import ENTROPY_PROBE, EntropyProbeConfig
from gradtrace.instruments.entropy_probe.reporter import without_prompts
from gradtrace.integrations.verl.driver.step import DriverSteps
from gradtrace.integrations.verl.settings import VerlSettings
from gradtrace.integrations.verl.tables import write_tables
from gradtrace.tasks.base import Prompt
from tests.integrations.verl.test_recorder import Run
from tests.training import small


def driver(folder: Path, on_error: str = "warn") -> tuple[DriverSteps, list[str]]:
    said: list[str] = []
    run = Run([Prompt([2, 3], {}), Prompt([2, 4], {})], said.append)
    settings = VerlSettings(run_dir=str(folder), entropy_probe=EntropyProbeConfig(every=2, on_error=on_error))
    found = DriverSteps(run, settings, ranks=2, temperature=1.0)
    found.start(0)
    said.clear()
    return found, said


def sampler(answer: RolloutBatch | Exception) -> Any:
    def sample(wanted: Samples, step: int) -> RolloutBatch:
        assert wanted.full_distribution and len(wanted.prompts) == 2
        if isinstance(answer, Exception):
            raise answer
        return answer

    return sample


def planned(steps: DriverSteps, batch: RolloutBatch, answer: RolloutBatch | Exception, step: int) -> dict[str, Any]:
    steps.submit(None, step)
    steps.collect(step, sampler(answer))
    steps.take()
    return steps.plan(batch, step)[1]


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


def test_tables_of_all_ranks_make_one_file(tmp_path: Path) -> None:
    batch, evaluation = update(), small.random_batch(groups=4, n=1, seed=3)
    steps, _ = driver(tmp_path)
    assert planned(steps, batch, evaluation, 2)[ENTROPY_PROBE].prompts == evaluation.prompts
    rows = torch.tensor([0, 1, 3])
    for rank, (mine, own) in enumerate(((range(2), [1]), (range(2, 4), [0, 3]))):
        table = Table(facts={"momentum": 0.5, "decay": 0.0, "legacy": 0.0, "rate": 1e-3}, seconds=1.0 + rank)
        for seed, name in enumerate(("base", "derivative", "after")):
            table.put(name, numbers(evaluation, mine, seed))
        table.put("shares", {row: torch.full((int(batch.response_lengths[row]),), float(row)) for row in own})
        write_tables(steps.folder, 2, rank, {ENTROPY_PROBE: table})
    metrics = steps.record(batch, 2, observed=True)
    steps.close()
    step = open_run(tmp_path).step(ENTROPY_PROBE, 2)
    lengths = batch.response_lengths[rows]
    assert step["share"][:3].tolist() == (lengths * rows).tolist() and step["row"][:3].tolist() == [0, 1, 3]
    assert metrics["entropy_probe/momentum_share"] == 0.5
    assert metrics["timing_s/entropy_probe"] == pytest.approx(2.0 + metrics["timing_s/entropy_probe_gen"])
    assert metrics["entropy_probe/delta_h_predicted"] == pytest.approx(step.meta["delta_h_predicted"])
    assert metrics["perf/generated_responses"] == len(batch) + len(evaluation)
    assert not list(steps.folder.iterdir())
    assert steps.record(batch, 3, observed=False) == {}


@pytest.mark.parametrize("cause", ["sampling", "prompts", "rank"])
def test_a_failure_costs_one_probe_or_with_raise_the_run(tmp_path: Path, cause: str) -> None:
    batch, evaluation = update(), small.random_batch(groups=3, n=1, seed=3)
    answer: Any = RuntimeError("no replica") if cause == "sampling" else evaluation
    if cause == "prompts":
        batch = batch.replace(prompts=evaluation.prompts[:2])

    def probe_once(steps: DriverSteps) -> dict[str, float]:
        plans = planned(steps, batch, answer, 2)
        if plans:
            for rank in range(2):
                write_tables(steps.folder, 2, rank, {ENTROPY_PROBE: Table(failure="not finite" * rank)})
        metrics = steps.record(batch, 2, observed=bool(plans))
        return {name: value for name, value in metrics.items() if not name.startswith("timing_s/")}

    steps, said = driver(tmp_path)
    assert probe_once(steps) == {"entropy_probe/errors": 1.0}
    assert len(said) == 1 and "step 2 is not traced" in said[0]
    steps.finish(finished=True)
    strict, _ = driver(tmp_path, "raise")
    with pytest.raises(GradtraceError, match="step 2 is not traced"):
        probe_once(strict)


def test_a_rank_without_a_table_is_named_with_what_to_do(tmp_path: Path) -> None:
    steps, _ = driver(tmp_path)
    write_tables(steps.folder, 2, 0, {ENTROPY_PROBE: Table(failure="x")})
    with pytest.raises(GradtraceError, match=r"rank 1 left no table of step 2.*gradtrace\.run_dir"):
        steps.record(update(), 2, observed=True)
