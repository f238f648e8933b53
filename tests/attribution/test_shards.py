"""Products and central differences over weights that are sharded on two ranks equal those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from gradtrace.attribution import Factored, Geometry, directional_derivative
from gradtrace.attribution.collectives import Ranks, gathered
from tests.attribution.ranks import on_two_ranks

PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)  # 5 × 7: shards of unequal size
    names = ("weight", "direction", "gradient", "x")
    return {name: torch.randn(5, 7, generator=generator, dtype=torch.float64) for name in names}


def value(weight: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(gathered(weight) * x).sum(1)


class Holder(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def worker(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh, ranks, whole, found = init_device_mesh("cpu", (2,)), Ranks(dist.group.WORLD), tensors(), {}
    for name, placement in PLACEMENTS.items():
        parts = {key: distribute_tensor(tensor, mesh, [placement]) for key, tensor in whole.items()}
        model = Holder(parts["weight"])
        optimizer = torch.optim.Adam([model.weight], lr=0.0)
        model.weight.grad = parts["gradient"]
        optimizer.step()
        denominator = Geometry(optimizer).denominator(model.weight, parts["direction"])
        assert isinstance(denominator, DTensor)
        factored = Factored.of(denominator)
        found[name] = {
            "product": ranks.products({"w": parts["direction"]}, {"w": parts["gradient"], "other": whole["x"]}),
            "derivative": directional_derivative(
                model,
                lambda model=model: value(model.weight, whole["x"]),
                {"weight": parts["direction"]},
                "finite_difference",
                ranks=ranks,
            ),
            "untouched": torch.equal(gathered(model.weight), whole["weight"]),
            "denominator": gathered(denominator),
            "factored": factored.preconditioner(),
        }
    found["plain"] = ranks.products({"w": whole["direction"]}, {"w": whole["gradient"]})
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    on_two_ranks(worker, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_shards_give_what_the_whole_gives(results: list[dict], placement: str) -> None:
    whole = tensors()
    product = float((whole["direction"] * whole["gradient"]).sum())
    exact = ((1 - torch.tanh(whole["weight"] * whole["x"]) ** 2) * whole["x"] * whole["direction"]).sum(1)
    model = Holder(whole["weight"])
    optimizer = torch.optim.Adam([model.weight], lr=0.0)
    model.weight.grad = whole["gradient"]
    optimizer.step()
    denominator = Geometry(optimizer).denominator(model.weight, whole["direction"])
    for found in (rank[placement] for rank in results):
        assert found["product"] == {"w": pytest.approx(product, rel=1e-12)}
        assert found["untouched"]
        assert torch.allclose(found["derivative"], exact, rtol=1e-6, atol=1e-8)
        assert torch.allclose(found["denominator"], denominator, rtol=1e-12)
        assert torch.allclose(found["factored"], Factored.of(denominator).preconditioner(), rtol=1e-12)


def test_what_every_rank_holds_whole_counts_once(results: list[dict]) -> None:
    whole = tensors()
    for found in results:
        assert found["plain"]["w"] == pytest.approx(float((whole["direction"] * whole["gradient"]).sum()), rel=1e-12)
