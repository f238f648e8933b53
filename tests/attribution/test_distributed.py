"""Two gloo processes that share groups give the scores of one process, and only small tensors travel."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gradtrace.attribution import InfluenceTracer
from tests.attribution.models import random_responses, tiny_model
from tests.attribution.ranks import on_two_ranks
from tests.attribution.reference import token_terms
from tests.attribution.scoring import capture, engine_scores, exact_config

CASES = {
    "response": {},
    "identity": {"hessian_mode": "identity"},
    "token-dense": {"hessian_source": "token"},
    "token-cg": {"hessian_source": "token", "solver": "cg"},
    "all-selected": {"accepted_rejected_scope": "all_selected", "contrastive_agg": "advantage"},
    "all-selected-token": {"accepted_rejected_scope": "all_selected", "hessian_source": "token"},
    "leave-out": {"exclude_self_response": True},
    "no-pairwise": {"pairwise": False, "contrastive_agg": "sum"},
    "projected": {"projection_dim_factor": 2},
    "optimizer": {"hessian_mode": "optimizer"},
    "optimizer-leave-out": {"hessian_mode": "optimizer", "exclude_self_response": True},
    "optimizer-factored": {"hessian_mode": "optimizer", "projection_dim_factor": 2},
}
# Groups 0 = {0, 1, 2} and 1 = {3, 4, 5} are both split; group 2 = {6, 7, 8} lives on rank 1 alone.
ROWS = {0: [[0, 3], [5]], 1: [[1, 2, 4], [6, 7, 8]]}


def stepped(model: torch.nn.Module) -> torch.optim.Optimizer:
    """An optimizer that has a state; the model is where it was."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    generator = torch.Generator().manual_seed(3)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def worker(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model, batch = tiny_model(), random_responses(groups=3)
    optimizer = stepped(model)
    results = {}
    for name, knobs in CASES.items():
        for streamed in (False, True):
            config = exact_config(credit="both", **knobs)
            with InfluenceTracer(model, config=config, process_group=dist.group.WORLD, optimizer=optimizer) as tracer:
                for rows in ROWS[rank]:
                    capture(tracer, model, batch, rows, labels_at_capture=streamed)
                trace = tracer.score(
                    accepted=batch.accepted,
                    group=batch.group,
                    advantages=batch.advantages,
                    terms=lambda responses: torch.cat([token_terms(model, batch, r) for r in responses]),
                )
            results[f"{name}/{streamed}"] = {
                "position": trace.position_scores,
                "loss_term": trace.loss_term_scores,
                "skipped": trace.skipped,
                "bytes": trace.metrics["influence_trace/debug_bytes_moved"],
                "dims": [block.dim for block in tracer.blocks],
            }
    with InfluenceTracer(model, config=exact_config()) as tracer, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for rows in ROWS[rank]:
            capture(tracer, model, batch, rows)
        alone = tracer.score(accepted=batch.accepted, group=batch.group)
    results["nobody said"] = {"warnings": alone.warnings, "told": [str(one.message) for one in told]}
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict]:
    folder = tmp_path_factory.mktemp("ranks")
    on_two_ranks(worker, folder)
    return {rank: torch.load(folder / f"{rank}.pt") for rank in (0, 1)}


@pytest.mark.parametrize("streamed", [False, True], ids=["stored", "streamed"])
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_give_the_scores_of_one(results: dict[int, dict], case: str, streamed: bool) -> None:
    model, batch = tiny_model(), random_responses(groups=3)
    config = exact_config(credit="both", **CASES[case])
    alone = engine_scores(model, batch, config, optimizer=stepped(model))
    for rank, rows in ROWS.items():
        for response in (r for part in rows for r in part):
            found = results[rank][f"{case}/{streamed}"]
            for credit, expected in (
                ("position", alone.position_scores),
                ("loss_term", alone.loss_term_scores),
            ):
                ours = found[credit][response]
                assert len(ours) == len(expected[response])
                if not len(ours):
                    continue
                error = float((ours - expected[response]).abs().max() / expected[response].abs().max())
                assert error < 1e-8, f"{credit} of response {response} on rank {rank} is off by {error:.1e}"


def test_only_response_gradients_of_split_groups_travel(results: dict[int, dict]) -> None:
    found = results[0]["response/True"]
    assert found["bytes"] == 8 * 6 * sum(found["dims"])  # six split responses in float64, once per module
    assert found["skipped"] == {2: "other_rank"} and results[1]["response/True"]["skipped"] == {}


def test_groups_that_are_split_without_a_process_group_are_warned_of(results: dict[int, dict]) -> None:
    for rank in ROWS:
        found = results[rank]["nobody said"]
        (said,) = [line for line in found["warnings"] if "process_group=" in line]
        assert said.startswith("2 groups have no scores") and said in found["told"]
