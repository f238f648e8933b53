"""TracIn selection on verl: scores of ranks against those of the embedded loop. Tests of test_engine.py, which has
run the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gradtrace.batch import RolloutBatch
from gradtrace.config.root import Config
from gradtrace.instruments.tracin.columns import TracinStep
from gradtrace.instruments.tracin.losses import aggregated
from gradtrace.instruments.tracin.observer import TracinObserver
from gradtrace.policy.load import load_policy
from gradtrace.policy.optimizer import Optimizer
from gradtrace.policy.settings import ModelConfig
from gradtrace.training.host import EmbeddedHost, loss_traits
from tests.integrations.verl import tracin_ranks


def embedded(folder: Path, step: int) -> TracinStep:
    """What the embedded loop finds, in one process and by forward mode."""
    batch: RolloutBatch = torch.load(folder / "tracin_train.pt", weights_only=False)
    policy = load_policy(folder / "tied_model", ModelConfig(device="cpu"), 1.0)
    config = Config()
    config.actor.optim.betas = [0.9, 0.999]
    optimizer = Optimizer(policy.trainable(), config.actor.optim, 10)
    if step == 2:
        for name, parameter in optimizer.parameters.items():
            optimizer.adamw.state[parameter] = {
                "step": torch.tensor(3.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": tracin_ranks.second_moments(name, parameter.shape),
            }
    validation = torch.load(folder / "tracin_val.pt", weights_only=False)
    settings = tracin_ranks.settings(step)
    host = EmbeddedHost(policy, optimizer, loss_traits(config.algorithm), token_budget=config.actor.token_budget)
    observer = TracinObserver(host, settings)
    assert observer.selector.method == "tangent"
    weigh = aggregated(list(tracin_ranks.AGGREGATIONS.values())[step - 1], config.rollout.max_new_tokens)
    return tracin_ranks.planned(tracin_ranks.Run(observer.answer, weigh), settings, batch, validation, step)


def found(folder: Path, world: int, layout: str, step: int) -> dict[str, Any]:
    return torch.load(folder / f"tracin.{world}.pt", weights_only=False)[layout][step]


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


CASES = [(world, layout, step) for world in (1, 2) for layout in tracin_ranks.layouts(world) for step in (1, 2)]


@pytest.mark.parametrize(("world", "layout", "step"), [case for case in CASES if case[1] not in ("lora", "bf16")])
def test_scores_of_responses_are_those_of_the_embedded_loop(folder: Path, world: int, layout: str, step: int) -> None:
    """Both are exact derivatives in float32, one by hooks on shards, one by forward mode: they differ by rounding."""
    expected, ours = embedded(folder, step), found(folder, world, layout, step)
    assert relative(ours["scores"], expected.scores) < 2e-5
    assert torch.equal(ours["kept"], expected.selected.kept) and not bool(ours["kept"].all())
    assert ours["val_loss"] == pytest.approx(expected.measures.val_loss, rel=1e-5)
    extremes = expected.measures.val_loss_min, expected.measures.val_loss_max, expected.measures.weighed
    assert ours["extremes"] == pytest.approx(list(extremes), rel=1e-5) and extremes[2] == (step == 2)
    assert ours["val_norms"] == pytest.approx(expected.measures.val_norms, rel=1e-4)
    if step == 1:  # the step with a diagnosis
        assert relative(ours["low"], expected.low) < 1e-4  # type: ignore[arg-type]
        assert ours["train_norm"] == pytest.approx(expected.measures.train_norm, rel=1e-5)
        assert ours["cosine"] == pytest.approx(expected.measures.cosine, rel=1e-4)


@pytest.mark.parametrize(("world", "layout"), [case[:2] for case in CASES if case[2] == 1])
def test_scores_add_up_to_the_product_of_the_gradients(folder: Path, world: int, layout: str) -> None:
    """⟨∇L_val, ∇L_train⟩ of the gradients that FSDP itself reduced; adapters included."""
    ours = found(folder, world, layout, 1)
    rounding = 1e-2 if layout == "bf16" else 1e-4
    assert float(ours["scores"].sum()) == pytest.approx(ours["product"], rel=rounding)


@pytest.mark.parametrize("step", [1, 2])
def test_training_in_bf16_gives_nearly_the_scores_of_float32(folder: Path, step: int) -> None:
    both = torch.stack([found(folder, 2, "bf16", step)["scores"], embedded(folder, step).scores])
    assert float(torch.corrcoef(both)[0, 1]) > 0.99


@pytest.mark.parametrize(("world", "layout", "step"), CASES)
def test_scoring_changes_no_bit_of_the_training(folder: Path, world: int, layout: str, step: int) -> None:
    ours = found(folder, world, layout, step)
    assert ours["changed"] == [] and ours["gradients"] == []


@pytest.mark.parametrize("world", [1, 2])
def test_what_fills_a_mini_batch_up_does_not_count_in_a_mean_over_responses(folder: Path, world: int) -> None:
    plain, filled = torch.load(folder / f"tracin.{world}.pt", weights_only=False)["normalised"]
    for name, gradient in plain.items():
        assert torch.equal(filled[name], gradient), name
