"""The four ways to trace nothing, each diagnosed by its cause."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gradtrace.attribution import InfluenceConfig
from gradtrace.commands.doctor.gradient_flow import check_gradient_flow
from tests.attribution.models import padded_objective, random_responses, tiny_model


@pytest.fixture
def model() -> nn.Module:
    return tiny_model()


def loss_of(model: nn.Module) -> Callable[[], torch.Tensor]:
    batch = random_responses()
    return lambda: padded_objective(model, batch, [0, 1, 2])


def only_problem(model: nn.Module, loss_fn: Callable[[], torch.Tensor], **knobs: object) -> str:
    report = check_gradient_flow(model, loss_fn, InfluenceConfig.older(**knobs))  # type: ignore[arg-type]
    assert len(report.problems) == 1
    return report.problems[0]


def test_a_healthy_model_has_rows_in_every_layer_and_no_grad_is_touched(model: nn.Module) -> None:
    report = check_gradient_flow(model, loss_of(model))
    assert report.healthy and len(report.layers) == 14
    assert all(layer.rows > 0 and layer.gradient_norm > 0 for layer in report.layers)
    assert all(p.grad is None for p in model.parameters())


def test_frozen_parameters(model: nn.Module) -> None:
    model.requires_grad_(False)
    assert "frozen" in only_problem(model, loss_of(model))


def test_a_loss_under_no_grad(model: nn.Module) -> None:
    loss_fn = loss_of(model)
    assert "torch.no_grad()" in only_problem(model, torch.no_grad()(loss_fn))


def test_a_detached_loss(model: nn.Module) -> None:
    loss_fn = loss_of(model)
    assert "detached from the graph" in only_problem(model, lambda: loss_fn().detach())


def test_a_graph_cut_in_the_middle_names_the_first_silent_layer(model: nn.Module) -> None:
    model.model.layers[0].register_forward_hook(lambda m, a, y: y.detach())
    problem = only_problem(model, loss_of(model))
    assert "7 of 14" in problem and "model.layers.0.self_attn.q_proj" in problem and "cut above" in problem


def test_a_filter_that_matches_nothing(model: nn.Module) -> None:
    assert "matches none" in only_problem(model, loss_of(model), module_name_filter=("nothing",))


def test_a_loss_of_another_model(model: nn.Module) -> None:
    assert "does not come from this model" in only_problem(model, loss_of(tiny_model()))


def test_a_nan_loss(model: nn.Module) -> None:
    loss_fn = loss_of(model)
    assert "nan" in only_problem(model, lambda: loss_fn() * float("nan"))
