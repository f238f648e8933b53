"""Products, central differences and parts over weights that are sharded on two ranks equal those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from gradtrace.attribution import Factored, Geometry, directional_derivative
from gradtrace.attribution.collectives import Ranks, gathered
from gradtrace.attribution.parts import token_parts
from tests.attribution.models import random_responses, tiny_model
from tests.attribution.ranks import on_two_ranks
from tests.attribution.test_parts import OPTIMIZERS, own_terms, rows_of, trained

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


def parts_of(how: str, rank: int, ranks: Ranks) -> dict[str, object]:
    """Every other response is of this rank. FSDP takes the mean of the ranks' gradients, replicas add theirs up."""
    model = tiny_model()
    if how == "fully_shard":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = OPTIMIZERS["adamw"](model.parameters())

    def backward(seed: int) -> None:
        optimizer.zero_grad()
        terms = own_terms(model, random_responses(seed=seed))[rank::2]
        (torch.cat(terms).sum() * (2 if how == "fully_shard" else 1)).backward()
        for p in model.parameters() if how == "replicas" else ():
            ranks.sum(p.grad)

    for seed in range(3):
        backward(seed)
        optimizer.step()
    backward(99)
    batch = random_responses(seed=99)
    whole = rows_of(batch)
    mine = {g: [row // 2 for row in rows if row % 2 == rank] for g, rows in whole.items()}
    found = token_parts(
        model,
        optimizer,
        lambda: own_terms(model, batch)[rank::2],
        measured=mine if how == "replicas" else None,
        ranks=ranks,
    )
    own = {g: [tokens.tolist() for tokens in parts.tokens] for g, parts in found.measured.items()}
    return {"parts": [tokens.tolist() for tokens in found.tokens], "own": own, "source": found.second_moment}


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
    found |= {how: parts_of(how, rank, ranks) for how in ("fully_shard", "replicas")}
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


@pytest.mark.parametrize("how", ["fully_shard", "replicas"])
def test_parts_on_two_ranks_are_those_of_one_process(results: list[dict], how: str) -> None:
    model, optimizer, batch = trained("adamw")
    expected = token_parts(model, optimizer, lambda: own_terms(model, batch), measured=rows_of(batch))
    for rank, found in enumerate(result[how] for result in results):
        assert found["source"] == expected.second_moment
        for ours, theirs in zip(found["parts"], expected.tokens[rank::2], strict=True):
            assert ours == pytest.approx(theirs.tolist(), rel=1e-7, abs=1e-13)
        for group, own in found["own"].items():
            measured = expected.measured[group]
            chosen = [
                tokens for row, tokens in zip(measured.responses, measured.tokens, strict=True) if row % 2 == rank
            ]
            for ours, theirs in zip(own, chosen, strict=True):
                assert ours == pytest.approx(theirs.tolist(), rel=1e-7, abs=1e-13)
    assert how == "fully_shard" or len(results[0][how]["own"]) == len(rows_of(batch))
