"""Scores about the contrast of log-probs, by each token's own term in the optimizer's geometry, against brute force."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from gradtrace.algorithms import Denominator, token_weights
from gradtrace.attribution.geometry import ClippedGradients
from gradtrace.batch import RolloutBatch
from gradtrace.metrics import Timer
from gradtrace.policy.microbatch import MicroBatches, Sequences
from gradtrace.training.host import open_instruments
from gradtrace.training.loop import Trainer
from tests.instruments.test_traces import columns, influence
from tests.training import small

KNOBS = (
    "trainer.influence_trace.enable=true",
    *("trainer.influence_trace.on_error=raise", "actor.mini_batch_size=0", "actor.optim.lr=1e-3"),
)
CONTRAST = influence("target=log_prob", "preconditioner_form=exact")


def second_step(
    folder: Path, *more: str, change: Callable[[RolloutBatch], RolloutBatch] = lambda batch: batch
) -> tuple[Trainer, RolloutBatch]:
    """A trainer whose second step was traced, with model and optimizer put back to the state before that step;
    `change` is done to every rollout."""
    trainer = small.trainer(folder, *KNOBS, *more)
    trainer.steps = open_instruments(trainer.components, trainer.files, print)
    trainer.steps.start(0)
    parts = trainer.components
    for step in (1, 2):
        batch = change(trainer.experience.collect(parts.generators["rollout"], Timer())[0])
        weights = {name: p.detach().clone() for name, p in parts.policy.model.named_parameters()}
        state = {name: value.clone() for name, value in parts.optimizer.state_tensors().items()}
        batch, _ = trainer.train_step(batch, step, Timer())
    trainer.steps.close()
    with torch.no_grad():
        for name, p in parts.policy.model.named_parameters():
            p.copy_(weights[name])
    parts.optimizer.load_state_tensors(state)
    return trainer, batch


def gradient(trainer: Trainer, value: torch.Tensor) -> dict[str, torch.Tensor]:
    named = trainer.components.policy.trainable()
    found = torch.autograd.grad(value, list(named.values()), allow_unused=True, retain_graph=True)
    return {name: g for name, g in zip(named, found, strict=True) if g is not None}


def brute_force(trainer: Trainer, batch: RolloutBatch, rows: torch.Tensor) -> list[np.ndarray]:
    """Response → the change of its group's contrast, per unit of learning rate, by each token's step: autograd token by
    token, over the linear layers but the head, with v̂ as the step will see it."""
    parts, loss = trainer.components, trainer.update.loss
    micro_batches = MicroBatches(batch, 10_000)
    everything = torch.arange(len(batch))
    weights = token_weights(
        batch.response_mask,
        loss.algorithm.aggregation,
        Denominator.of(batch.response_mask, loss.max_response_length),
    )
    (loss.token_losses(batch, micro_batches, everything) * weights[batch.response_mask]).sum().backward()
    coming = ClippedGradients(parts.policy.model, parts.optimizer.config.grad_clip)
    adamw = parts.optimizer.adamw
    beta, epsilon = adamw.defaults["betas"][1], adamw.defaults["eps"]
    layers = {
        f"{name}.weight"
        for name, module in parts.policy.model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not parts.policy.model.get_output_embeddings()
    }
    scale = {}
    for name, parameter in parts.policy.trainable().items():
        state = adamw.state[parameter]
        moment = beta * state["exp_avg_sq"] + (1 - beta) * coming[name] ** 2
        scale[name] = 1 / ((moment / (1 - beta ** (float(state["step"]) + 1))).sqrt() + epsilon)
    found = []
    for row in rows.tolist():
        siblings = (batch.group == batch.group[row]).nonzero().squeeze(-1)
        assert batch.rewards is not None
        good = batch.rewards[siblings] == batch.rewards[siblings].max()
        log_probs = parts.policy.statistics(Sequences.of(batch).padded(siblings))[0]
        means = [part.mean() for part in log_probs.split(batch.written_counts[siblings].tolist())]
        contrast = sum(
            mean / good.sum() if is_good else -mean / (~good).sum() for mean, is_good in zip(means, good, strict=True)
        )
        target = gradient(trainer, contrast)
        losses = loss.token_losses(batch, micro_batches, torch.tensor([row]))
        found.append(
            np.array(
                [
                    float(sum((-step[n] * scale[n] * target[n]).sum() for n in step if n in layers and n in target))
                    for step in (gradient(trainer, term) for term in losses)
                ]
            )
        )
    return found


@pytest.mark.parametrize("extra", [(), ("algorithm.kl_coef=0.1",), ("algorithm.aggregation=sequence_mean",)])
def test_scores_are_what_one_optimizer_step_does_to_first_order(tmp_path: Path, extra: tuple[str, ...]) -> None:
    trainer, batch = second_step(tmp_path, *CONTRAST, *extra)
    step = columns(trainer.files.path, step=2)
    chosen = np.arange(4)
    rows = torch.from_numpy(step["row"][chosen].astype(np.int64))
    for index, expected in zip(chosen, brute_force(trainer, batch, rows), strict=True):
        own = slice(step["token_offsets"][index], step["token_offsets"][index + 1])
        found = step["influence_loss_term"][own]
        np.testing.assert_allclose(found, expected, rtol=5e-3, atol=5e-3 * np.abs(expected).max())


def test_the_file_says_where_the_second_moment_came_from(tmp_path: Path) -> None:
    import json

    trainer, _ = second_step(tmp_path, *CONTRAST)
    first, second = (json.loads(columns(trainer.files.path, step=number)["meta_json"].tobytes()) for number in (1, 2))
    assert first["second_moment_loss_term"] == "batch_gradient"
    assert second["second_moment_loss_term"] == "state_with_batch"
    assert second["second_moment_backward"] == "state_before"
    assert (first["step"], second["step"]) == (1, 2)
    assert second["target"].startswith("log_prob") or "log-prob" in second["target"]
