"""The default score inside TRL: what the coming step of its optimizer does to each token, held against autograd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gradtrace
from gradtrace.attribution import InfluenceConfig
from gradtrace.errors import GradtraceError
from gradtrace.integrations.trl import attach
from gradtrace.policy.policy import KeepDouble
from tests.integrations.trl_runs import grpo_trainer

STEPS = 2


class AroundLastStep:
    """Keeps what the last optimizer step was given: weights, gradients after clipping, and Adam's state; and the
    weights that it led to."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.calls = 0

    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.calls += 1
        group = optimizer.param_groups[0]
        self.rate, self.betas, self.epsilon = group["lr"], group["betas"], group["eps"]
        named = {n: p for n, p in self.trainer.model.named_parameters() if p.grad is not None}
        self.weights = {n: p.detach().clone() for n, p in self.trainer.model.named_parameters()}
        self.gradients = {n: p.grad.detach().clone() for n, p in named.items()}
        self.moments = {n: optimizer.state[p]["exp_avg_sq"].clone() for n, p in named.items() if optimizer.state[p]}
        self.count = self.calls

    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.reached = {n: p.detach().clone() for n, p in self.trainer.model.named_parameters()}

    def direction(self) -> dict[str, Tensor]:
        """What this gradient contributes to the step of AdamW."""
        first, second = self.betas
        found = {}
        for name, gradient in self.gradients.items():
            moment = second * self.moments[name] + (1 - second) * gradient**2
            denominator = (moment / (1 - second**self.count)).sqrt() + self.epsilon
            found[name] = -self.rate * (1 - first) / (1 - first**self.count) * gradient / denominator
        return found


@pytest.mark.parametrize("max_grad_norm", [1e9, 1e-3])
def test_default_scores_are_those_of_autograd(tmp_path: Path, max_grad_norm: float) -> None:
    trainer = grpo_trainer(
        tmp_path, dtype=torch.float64, learning_rate=1e-4, max_steps=STEPS, max_grad_norm=max_grad_norm
    )
    attach(trainer, tmp_path / "run", on_error="raise", influence=InfluenceConfig(measure="all"))
    trainer.create_optimizer()
    seen = AroundLastStep(trainer)
    trainer.optimizer.register_step_pre_hook(seen.before)
    trainer.optimizer.register_step_post_hook(seen.after)
    trainer.train()
    model = trainer.model.eval()
    step = gradtrace.open_run(tmp_path / "run").step("influence_trace", STEPS)
    prompts = [
        step["prompt_ids"][a:b] for a, b in zip(step["prompt_offsets"], step["prompt_offsets"][1:], strict=False)
    ]

    def log_probs(weights: dict[str, Tensor], r: int) -> np.ndarray:
        prompt = prompts[step["group"][r]]
        ids = torch.tensor(np.concatenate([prompt, step.tokens(r)["token_id"]])).long()[None]
        with torch.no_grad(), KeepDouble():
            logits = torch.func.functional_call(model, weights, kwargs={"input_ids": ids}).logits
        logits = logits[0, len(prompt) - 1 : -1].double() / trainer.temperature
        return torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None]).squeeze(1).numpy()

    direction = seen.direction()
    moved = {n: w + direction[n] if n in direction else w for n, w in seen.weights.items()}
    scores, changes = [], []
    for r in range(step.n_responses):
        factor = step["loss_weight"][r] * step["advantage"][r]
        own = step.tokens(r)
        change = factor * (log_probs(moved, r) - log_probs(seen.weights, r))
        np.testing.assert_allclose(own["influence"], change, rtol=2e-3, atol=1e-3 * np.abs(change).max())
        np.testing.assert_allclose(own["log_prob_after"], log_probs(seen.reached, r), rtol=1e-4, atol=1e-6)
        scores.append(own["influence"].sum())
        changes.append(factor * (log_probs(seen.reached, r) - log_probs(seen.weights, r)).sum())
    # All of them add up to the slope of the loss that TRL has trained on, whose normaliser is in no file.
    slope = -sum(float((g * direction[n]).sum()) for n, g in seen.gradients.items())
    if max_grad_norm > 1:
        assert sum(scores) == pytest.approx(slope, rel=2e-2)
    owner = step["group"]
    for g in np.unique(owner):
        expected = sum(change for change, own in zip(changes, owner, strict=True) if own == g)
        assert step["objective_change"][g] == pytest.approx(expected, rel=1e-3, abs=1e-9)


def test_rollouts_of_several_optimizer_steps_are_refused_with_the_setting(tmp_path: Path) -> None:
    trainer = grpo_trainer(tmp_path, steps_per_generation=4)
    attach(trainer, tmp_path / "run", on_error="raise")
    with pytest.raises(GradtraceError, match="set steps_per_generation to gradient_accumulation_steps"):
        trainer.train()
