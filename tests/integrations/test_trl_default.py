"""The default score inside TRL: a token's own step in the geometry of TRL's optimizer, held against autograd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gradtrace
from gradtrace.attribution import InfluenceConfig
from gradtrace.integrations.trl import attach
from gradtrace.trace.columns import Credit
from tests.integrations.trl_runs import grpo_trainer

STEPS = 2


class BeforeLastStep:
    """Keeps what the last optimizer step was given: weights, gradients after clipping, and Adam's second moments."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.calls = 0

    def hook(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.calls += 1
        if self.calls < STEPS:
            return
        group = optimizer.param_groups[0]
        self.beta, self.epsilon = group["betas"][1], group["eps"]
        named = {n: p for n, p in self.trainer.model.named_parameters() if p.grad is not None}
        self.weights = {n: p.detach().clone() for n, p in self.trainer.model.named_parameters()}
        self.gradients = {n: p.grad.detach().clone() for n, p in named.items()}
        self.moments = {n: optimizer.state[p]["exp_avg_sq"].clone() for n, p in named.items()}
        self.count = float(optimizer.state[next(iter(named.values()))]["step"]) + 1

    def scale(self, name: str) -> Tensor:
        moment = self.beta * self.moments[name] + (1 - self.beta) * self.gradients[name] ** 2
        return 1 / ((moment / (1 - self.beta**self.count)).sqrt() + self.epsilon)


@pytest.mark.parametrize("max_grad_norm", [1e9, 1e-3])
def test_default_scores_are_those_of_autograd(tmp_path: Path, max_grad_norm: float) -> None:
    trainer = grpo_trainer(
        tmp_path, dtype=torch.float64, learning_rate=1e-3, max_steps=STEPS, max_grad_norm=max_grad_norm
    )
    config = InfluenceConfig(projection_dim_factor=0, loss_term_prompts=0)
    attach(trainer, tmp_path / "run", influence=config, on_error="raise")
    trainer.create_optimizer()
    before = BeforeLastStep(trainer)
    trainer.optimizer.register_step_pre_hook(before.hook)
    trainer.train()
    model = trainer.model.eval()
    model.load_state_dict(before.weights, strict=False)
    step = gradtrace.open_run(tmp_path / "run").step("influence_trace", STEPS)
    assert (step["credit"] == Credit.LOSS_TERM).all() and step["optimizer_step"].max() == 0
    layers = {
        f"{name}.weight": module.weight
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings()
    }

    def log_probs(r: int) -> Tensor:
        g = step["group"][r]
        prompt = step["prompt_ids"][step["prompt_offsets"][g] : step["prompt_offsets"][g + 1]]
        ids = torch.tensor(np.concatenate([prompt, step.tokens(r)["token_id"]])).long()[None]
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].double() / trainer.temperature
        return torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None]).squeeze(1)

    def gradient(value: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(value, list(layers.values()), retain_graph=True))

    group = step["group"] == step["group"][0]
    good = step["accepted"] & group
    bad = ~step["accepted"] & group
    contrast = sum(log_probs(r).mean() / good.sum() for r in good.nonzero()[0])
    contrast = contrast - sum(log_probs(r).mean() / bad.sum() for r in bad.nonzero()[0])
    direction = [g * before.scale(name) for name, g in zip(layers, gradient(contrast), strict=True)]
    for r in group.nonzero()[0][:3]:
        values = log_probs(r)
        likelier = [
            float(sum((a * b).sum() for a, b in zip(gradient(value), direction, strict=True))) for value in values
        ]
        expected = float(step["advantage"][r]) * np.array(likelier)
        tolerance = 1e-4 * np.abs(expected).max()
        np.testing.assert_allclose(step.influence(r), expected, rtol=1e-3, atol=tolerance)
