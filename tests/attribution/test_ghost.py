"""Identity 7: ghost product = Frobenius product of autograd gradients = jvp along the target gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradtrace.attribution import AttributionError, GhostProduct, directional_derivative
from tests.attribution.models import FAMILIES, Responses, padded_objective, random_responses, tiny_model
from tests.attribution.reference import token_terms


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: g for name, g in zip(named, found, strict=True) if g is not None}


def ghost_scores(model: nn.Module, batch: Responses, target: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list]:
    ghost = GhostProduct(model, target)
    for rows in ([0, 3, 5], [1, 2, 4]):
        with ghost.capture(response=torch.tensor(rows), tokens=batch.padded(rows)[2]):
            padded_objective(model, batch, rows).backward()
    ghost.close()
    return ghost.scores(len(batch)), ghost.missed


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_ghost_equals_product_of_gradients_equals_jvp(family: str, tied: bool) -> None:
    model, batch, validation = tiny_model(family, tied), random_responses(), random_responses(seed=9)
    target = gradients(model, padded_objective(model, validation, [0, 1, 2, 3]))
    scores, missed = ghost_scores(model, batch, target)
    covered = {name: g for name, g in target.items() if name not in missed}
    assert any(name.endswith("bias") for name in covered) == (family != "llama")
    for r in range(len(batch)):
        own = gradients(model, padded_objective(model, batch, [r]))
        product = sum((own[name] * g).sum() for name, g in covered.items())
        assert torch.allclose(scores[r], product, rtol=1e-9, atol=1e-9)
    losses = directional_derivative(
        model, lambda: torch.stack([token_terms(model, batch, r).sum() for r in range(len(batch))]), covered
    )
    assert torch.allclose(scores, losses, rtol=1e-8, atol=1e-9)


def test_lora_adapters() -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    config = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = get_peft_model(tiny_model(), config).double()
    batch, validation = random_responses(), random_responses(seed=9)
    target = gradients(model, padded_objective(model, validation, [0, 1, 2]))
    scores, missed = ghost_scores(model, batch, target)
    assert missed == []
    for r in range(len(batch)):
        own = gradients(model, padded_objective(model, batch, [r]))
        assert torch.allclose(scores[r], sum((own[n] * g).sum() for n, g in target.items()), rtol=1e-9, atol=1e-9)


def test_responses_that_were_not_captured_are_nan_not_zero() -> None:
    model, batch = tiny_model(), random_responses()
    ghost = GhostProduct(model, gradients(model, padded_objective(model, batch, [0])))
    with ghost.capture(response=torch.tensor([2, -1]), tokens=batch.padded([2, 1])[2]):
        padded_objective(model, batch, [2, 1]).backward()
    scores = ghost.scores(4)
    assert torch.isnan(scores).tolist() == [True, True, False, True]


def test_a_target_without_linear_weights_is_refused() -> None:
    with pytest.raises(AttributionError, match="names no weight"):
        GhostProduct(tiny_model(), {"model.norm.weight": torch.zeros(8)})


def test_scores_without_a_capture_are_refused() -> None:
    model = tiny_model()
    with pytest.raises(AttributionError, match="nothing was captured"):
        GhostProduct(model, {"lm_head.weight": torch.zeros(13, 8)}).scores(2)
