"""Every loss of TRL: its trace equals our engine's on the loss as it is written out here, also away from ratio 1."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer

from gradtrace.integrations.trl.losses import LOSS_TYPES
from gradtrace.trace.step import Step
from tests.integrations.trl_reference import EXACT, UNSCALED, assert_equal, engine_scores, step_of, train

CLIP = 0.2
"""TRL's default of epsilon, and therefore of epsilon_high."""


def slope(loss_type: str, log_ratio: Tensor, advantage: float, high: float) -> Tensor:
    """[T]: derivative of a token's term of the loss by its log-prob."""
    ratio = log_ratio.exp()
    if loss_type == "cispo":
        return -advantage * ratio.clamp(max=high)
    if loss_type == "sapo":
        temperature = 1.0 if advantage > 0 else 1.05
        gate = torch.sigmoid(temperature * (ratio - 1))
        return -advantage * 4 * gate * (1 - gate) * ratio
    if loss_type == "vespo":
        k, rate = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
        whole = log_ratio.sum().exp()
        return (-advantage * whole**k * (rate * (1 - whole)).exp()).expand(len(log_ratio))
    clipped = ratio > 1 + high if advantage > 0 else ratio < 1 - CLIP
    return torch.where(clipped, 0.0, -advantage * ratio)


def slopes(loss_type: str, step: Step, drift: Tensor, high: float = CLIP) -> list[Tensor]:
    """Of the traced responses. `drift` [R, C]: log-ratios of the rollout's tokens; `high`: epsilon_high."""
    return [
        slope(loss_type, drift[step["row"][r], : step["length"][r]], float(step["advantage"][r]), high)
        for r in range(step.n_responses)
    ]


class Drifted(GRPOTrainer):
    """The policy has moved since it sampled: log-ratios are `DRIFT` at every pass."""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        old = output["old_per_token_logps"]
        return output | {"old_per_token_logps": old - DRIFT[:, : old.shape[1]]}


DRIFT = 0.3 * torch.sin(torch.arange(48.0, dtype=torch.float64) ** 2).view(8, 6)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_normaliser_of_every_loss_is_undone(loss_type: str, tmp_path: Path) -> None:
    model = train(tmp_path, {"loss_type": loss_type}, influence=UNSCALED)
    step = step_of(tmp_path)
    at_one = slopes(loss_type, step, torch.zeros_like(DRIFT))
    assert_equal(step, engine_scores(model, step, UNSCALED, slopes=at_one))


@pytest.mark.parametrize("loss_type", ["dapo", "sapo", "cispo", "vespo"])
def test_terms_of_every_kind_of_loss_are_right_where_the_policy_has_moved(loss_type: str, tmp_path: Path) -> None:
    """Clipped, gated, bounded or weighed by the whole response: four ways to treat a ratio."""
    high = 1.1 if loss_type == "cispo" else CLIP  # so that some of the drifted ratios are bounded and some not
    setup = {
        "loss_type": loss_type,
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "epsilon_high": high,
    }
    model = train(tmp_path, {**setup, "per_device_train_batch_size": 2}, cls=Drifted)
    step = step_of(tmp_path)
    moved = slopes(loss_type, step, DRIFT, high)
    assert_equal(step, engine_scores(model, step, EXACT, slopes=moved))
    still = engine_scores(model, step, EXACT, slopes=slopes(loss_type, step, torch.zeros_like(DRIFT), high))
    with pytest.raises(AssertionError, match="is off by"):
        assert_equal(step, still, tolerance=1e-2)


@pytest.mark.parametrize("loss_type", ["grpo", "luspo"])
def test_a_ratio_of_whole_responses_is_the_same_objective_at_ratio_one(loss_type: str, tmp_path: Path) -> None:
    model = train(tmp_path, {"loss_type": loss_type, "importance_sampling_level": "sequence"})
    assert_equal(step_of(tmp_path), engine_scores(model, step_of(tmp_path), EXACT))


@pytest.mark.parametrize(
    "setup", [{"loss_type": "cispo"}, {"top_entropy_quantile": 0.5}], ids=["cispo", "high_entropy"]
)
def test_log_prob_does_not_ride_on_a_loss_that_is_not_proportional_to_it(setup: dict[str, Any], tmp_path: Path) -> None:
    config = dataclasses.replace(UNSCALED, output_function="log_prob")
    model = train(tmp_path, setup, influence=config)
    assert_equal(step_of(tmp_path), engine_scores(model, step_of(tmp_path), config))


def test_tokens_that_trl_leaves_out_for_their_low_entropy_have_no_term(tmp_path: Path) -> None:
    setup = {"top_entropy_quantile": 0.5, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    model = train(tmp_path, setup)
    step = step_of(tmp_path)
    entropies = torch.tensor(step["entropy"]).double()
    high = (entropies >= entropies.quantile(0.5)).split(step["length"].tolist())
    kept = [torch.where(high[r], -float(step["advantage"][r]), 0.0) for r in range(step.n_responses)]
    assert_equal(step, engine_scores(model, step, EXACT, slopes=kept))
