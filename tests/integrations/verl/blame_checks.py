"""Blame on verl: shares of ranks against brute force in float64. Tests of test_engine.py, which has run the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from gradtrace.instruments.blame import BLAME
from gradtrace.instruments.blame.reporter import StepBlame
from gradtrace.instruments.mismatch.share import share_metrics
from tests.integrations.verl import blame_ranks, cases, harness

ALL = [(world, name) for world in (1, 2) for name in blame_ranks.names(world)]
SAME = [(world, name) for world, name in ALL if name not in ("blame_flash", "blame_lora")]
"""Those whose gradient plain autograd makes, too: the others have another precision, or other random numbers."""


def of_ranks(folder: Path, name: str, world: int) -> StepBlame:
    """As the driver joins it from the ranks' tables."""
    table = harness.table_of(folder / f"{name}.{world}", world, BLAME)
    assert not table.failure and table.facts["largest_norm"] > 0
    return StepBlame.of_table(blame_ranks.batch_of(folder, name), table)


def log_probs_of(folder: Path, name: str) -> tuple[torch.nn.Module, dict[int, torch.Tensor]]:
    """A model in float64, and row → the log-probs [T_r] that it gives to the responses of the first mini-batch."""
    batch, found = blame_ranks.batch_of(folder, name), {}
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    for row in (torch.tensor(cases.PLAN) == 0).nonzero().squeeze(-1).tolist():
        prompt, length = batch.prompts[int(batch.group[row])], int(batch.response_lengths[row])
        ids = torch.tensor([prompt + batch.responses[row, :length].tolist()])
        logits = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        found[row] = logits.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
    return model, found


def brute_force(folder: Path, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the first mini-batch, by autograd in float64: shares [R, T] of ‖g‖², pushes [R, T], and [R, D], the gradients
    of single responses in the linear layers."""
    case, batch = blame_ranks.BLAMED[name], blame_ranks.batch_of(folder, name)
    model, found = log_probs_of(folder, name)
    rows, log_probs = torch.tensor(list(found)), list(found.values())
    mask = batch.response_mask.double()
    weights = mask / mask[rows].sum()
    if case.actor:
        weights = mask / mask.sum(1, keepdim=True).clamp(min=1) / len(rows)
    if case.layout.get("corrected"):
        weights = weights * harness.correction(batch).double()
    weights = -weights * batch.advantages.double()  # type: ignore[union-attr]
    terms = [weights[row, : len(values)] * values for row, values in found.items()]
    named = dict(model.named_parameters())
    linear = [name for name in named if "proj" in name and name.endswith("weight")]

    def gradient(value: torch.Tensor, names: list[str]) -> torch.Tensor:
        found = torch.autograd.grad(value, [named[n] for n in names], retain_graph=True, allow_unused=True)
        return torch.cat(
            [
                (torch.zeros_like(named[n]) if part is None else part).flatten()
                for n, part in zip(names, found, strict=True)
            ]
        )

    whole = gradient(torch.cat(terms).sum(), list(named))
    share, push = torch.zeros(mask.shape).double(), torch.zeros(mask.shape).double()
    for row, own, values in zip(rows.tolist(), terms, log_probs, strict=True):
        for place in batch.response_mask[row].nonzero().squeeze(-1).tolist():
            share[row, place] = gradient(own[place], list(named)) @ whole / (whole @ whole)
            push[row, place] = -gradient(values[place], list(named)) @ whole
    return share, push, torch.stack([gradient(own.sum(), linear) for own in terms])


@pytest.mark.parametrize(("world", "name"), SAME)
def test_shares_norms_and_products_of_ranks_equal_brute_force(folder: Path, name: str, world: int) -> None:
    """Small steps on shards in float32, split groups, masks with holes, clipping and correction weights included."""
    found, (share, push, linear) = of_ranks(folder, name, world), brute_force(folder, name)
    rows = (torch.tensor(cases.PLAN) == 0).nonzero().squeeze(-1)
    for ours, theirs in ((found.share, share), (found.push, push)):
        assert float((ours[rows] - theirs[rows]).abs().max() / theirs.abs().max()) < 2e-3
    assert torch.allclose(found.norm[rows], linear.norm(dim=1), rtol=1e-4)
    products = torch.stack([found.sketch[row] for row in rows.tolist()]).double()
    assert torch.allclose(products @ products.T, linear @ linear.T, atol=1e-4 * float(linear.square().sum()))


@pytest.mark.parametrize(("world", "name"), ALL)
def test_shares_of_every_optimizer_step_add_up_to_one(folder: Path, name: str, world: int) -> None:
    """Adapters and bf16 included: there the gradient is that of half precision, and the derivatives are not."""
    found = of_ranks(folder, name, world)
    assert [update["number"] for update in found.updates] == [0, 1]
    for update in found.updates:
        own = found.optimizer_step == update["number"]
        assert float(found.share[own].sum()) == pytest.approx(1.0, abs=0.05 if "flash" in name else 2e-3)
        parts = [update[f"from_{part}"] for part in ("batch", "momentum", "decay")]
        assert sum(parts) == pytest.approx(1.0) and (parts[1] != 0) == (update["number"] == 1)
        assert (parts[2] != 0) == (update["clip_factor"] < 1) == (name == "blame_corrected")
        assert 0.1 < update["norm_coverage"] <= 1.0


@pytest.mark.parametrize(("world", "name"), SAME)
def test_blame_takes_two_passes(folder: Path, name: str, world: int) -> None:
    """One forth and one back: the length of a step is known from the loss, and need not be tried. A later epoch has
    none."""
    counted = torch.load(folder / f"{name}.{world}" / "counted0.pt")
    assert counted["passes"] == [2, 2, 0]


def test_half_precision_with_an_attention_that_has_no_other_gives_nearly_the_shares_of_float32(
    folder: Path,
) -> None:
    """Flash attention refuses float32, as the one of this test does: passes in float32 take torch's own instead."""
    found, (share, _, linear) = of_ranks(folder, "blame_flash", 2), brute_force(folder, "blame_flash")
    first = torch.tensor(cases.PLAN) == 0
    mask = blame_ranks.batch_of(folder, "blame_flash").response_mask & first[:, None]
    assert float(torch.corrcoef(torch.stack([found.share[mask], share[mask]]))[0, 1]) > 0.99
    assert torch.allclose(found.norm[first], linear.norm(dim=1), rtol=0.1)


@pytest.mark.parametrize(("world", "name"), ALL)
def test_training_does_not_notice_blame(folder: Path, name: str, world: int) -> None:
    for rank in range(world):
        made = torch.load(folder / f"{name}.{world}" / f"rank{rank}.pt")
        for kind, values in made[False].items():
            for key, value in values.items():
                assert torch.equal(made[True][kind][key], value), f"{kind} {key}"


@pytest.mark.parametrize("world", [1, 2])
def test_the_mismatchs_share_of_the_update_on_ranks_equals_brute_force(folder: Path, world: int) -> None:
    """‖g_ρ − g_1‖/‖g_ρ‖, by autograd over the clipped loss in float64; training does not notice that it is measured."""
    batch = blame_ranks.batch_of(folder, "blame_packed")
    model, found = log_probs_of(folder, "blame_packed")
    sampled = harness.sampled_log_probs(batch).double()
    tokens = sum(len(values) for values in found.values())

    def gradient(old: dict[int, torch.Tensor]) -> torch.Tensor:
        loss = torch.zeros((), dtype=torch.float64)
        for row, values in found.items():
            ratio = (values - old[row]).exp()
            advantages = batch.need("advantages")[row, : len(values)].double()
            terms = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
            loss = loss + torch.where(advantages < 0, terms.minimum(-3.0 * advantages), terms).sum() / tokens
        found_gradient = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)
        return torch.cat([part.flatten() for part in found_gradient if part is not None])

    with_ratio = gradient({row: sampled[row, : len(values)] for row, values in found.items()})
    due = with_ratio - gradient({row: values.detach() for row, values in found.items()})
    metrics = share_metrics(*harness.table_of(folder / f"mismatch.{world}", world, "mismatch").facts["products"])
    share = float(due.norm() / with_ratio.norm())
    assert metrics["mismatch/share_of_update"] == pytest.approx(share, rel=1e-4) and share > 0.05
    squared = float(due @ with_ratio / with_ratio.square().sum())
    assert metrics["mismatch/share_of_squared_norm"] == pytest.approx(squared, rel=1e-3)
    for rank in range(world):
        made = torch.load(folder / f"mismatch.{world}" / f"rank{rank}.pt")
        for key, value in made[False]["parameters"].items():
            assert torch.equal(made[True]["parameters"][key], value), key
