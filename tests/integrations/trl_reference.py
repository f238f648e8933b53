"""Scores of a TRL step by the engine alone: what the trace of a GRPOTrainer is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from trl import GRPOTrainer

import gradtrace
from gradtrace.attribution import InfluenceConfig, InfluenceTracer
from gradtrace.integrations.trl import attach
from gradtrace.trace.step import Step
from tests.integrations.trl_runs import grpo_trainer

POSITION = InfluenceConfig.older(projection_dim_factor=0)
UNSCALED = InfluenceConfig.older(projection_dim_factor=0, hessian_mode="identity")
"""With curvature, a factor common to all gradients would cancel; here it shows."""
EXACT = InfluenceConfig.older(projection_dim_factor=0, credit="both")


def step_of(folder: Path, number: int = 1, kind: str = "influence_trace") -> Step:
    run = gradtrace.open_run(folder / "run")
    assert run.verify() == []
    return run.step(kind, number)


def train(folder: Path, setup: dict[str, Any], cls: type[GRPOTrainer] = GRPOTrainer, **settings: Any) -> nn.Module:
    """The model of a traced run with a learning rate of 0: every pass was at the same θ, which it still has."""
    trainer = grpo_trainer(folder, cls, dtype=torch.float64, learning_rate=0.0, **{"max_steps": 1, **setup})
    attach(trainer, folder / "run", **{"influence": EXACT, "on_error": "raise", **settings})
    trainer.train()
    model = trainer.model.eval()
    if model.is_gradient_checkpointing:
        model.gradient_checkpointing_disable()
        model.get_input_embeddings()._forward_hooks.clear()  # requires_grad_, which forward mode does not allow
    return model  # type: ignore[no-any-return]


def engine_scores(
    model: nn.Module,
    step: Step,
    config: InfluenceConfig,
    bonus: float = 0.0,
    slopes: list[Tensor] | None = None,
) -> dict[str, np.ndarray]:
    """Scores of the step's tokens by the engine alone: one right-padded batch, the objective written out here.
    `slopes`: of every response, by each of its tokens' log-probs, where the loss is not −A ℓ."""
    advantage = torch.tensor(step["advantage"]).double()
    rewards = torch.tensor(step["reward"]).double()
    prompts = [
        step["prompt_ids"][a:b] for a, b in zip(step["prompt_offsets"], step["prompt_offsets"][1:], strict=False)
    ]
    responses = [step.tokens(r)["token_id"] for r in range(step.n_responses)]
    rows = [np.concatenate([prompts[step["group"][r]], responses[r]]) for r in range(step.n_responses)]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    tokens = torch.zeros(ids.shape, dtype=torch.bool)
    for r, row in enumerate(rows):
        ids[r, : len(row)] = torch.tensor(row)
        tokens[r, len(row) - len(responses[r]) : len(row)] = torch.tensor(step.written(r))
    weight = {
        "training_loss": -advantage,
        "log_prob_advantage": advantage,
        "log_prob": torch.ones_like(advantage),
        "log_prob_reward": rewards,
    }[config.output_function]
    token_weight = weight[:, None].repeat(1, ids.shape[1])
    for r, slope in enumerate(slopes or []):
        token_weight[r, tokens[r]] = slope.double()
    signs = {"log_prob": torch.ones_like(rewards), "log_prob_reward": rewards}.get(config.output_function, advantage)

    def terms(chosen: list[int]) -> Tensor:
        logits = model(input_ids=ids[chosen]).logits[:, :-1].double()
        log_probs = torch.log_softmax(logits, -1)
        values = token_weight[chosen, 1:] * log_probs.gather(-1, ids[chosen, 1:, None]).squeeze(-1)
        if bonus:
            values = values + bonus * (log_probs.exp() * log_probs).sum(-1)
        return values[tokens[chosen, 1:]]

    with InfluenceTracer(model, config=config) as tracer:
        with tracer.capture(response=torch.arange(len(rows)), tokens=tokens):
            terms(list(range(len(rows)))).sum().backward()
        trace = tracer.score(
            accepted=torch.tensor(step["accepted"]),
            group=torch.tensor(step["group"]).long(),
            sign=torch.where(signs < 0, -1.0, 1.0),
            terms=terms,
        )
    scores = {"influence_position": torch.cat(trace.position_scores).numpy()}
    if trace.loss_term_scores is not None:
        scores["influence_loss_term"] = torch.cat(trace.loss_term_scores).numpy()
    return scores


def assert_equal(step: Step, expected: dict[str, np.ndarray], tolerance: float = 1e-5) -> None:
    own = np.concatenate([step.written(r) for r in range(step.n_responses)])
    for column, scores in expected.items():
        assert np.isnan(step[column][~own]).all()
        error = np.linalg.norm(step[column][own] - scores) / np.linalg.norm(scores)
        assert error < tolerance, f"{column} is off by {error:.1e}"
