"""A sampler whose log-probs are not the trainer's, in TRL: in the files, in the metrics, and in the step's gradient.

vLLM is not installed here. What it hands to TRL is: completions with log-probs of their tokens; here those of a bf16
copy of the model, with which TRL's own correction runs as it does behind vLLM.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer

import gradtrace
from gradtrace.integrations.trl import attach
from gradtrace.trace.step import Step
from tests.integrations.trl_reference import UNSCALED, assert_equal, engine_scores, step_of, train
from tests.integrations.trl_runs import grpo_trainer


class CoarseSampler(GRPOTrainer):
    """Samples as TRL does, and says the log-probs that a copy in bf16 has."""

    def _generate_single_turn(self, prompt_ids: list[list[int]], *others: Any, **more: Any) -> Any:
        corrects, self.use_vllm = self.use_vllm, False
        completions, _ = super()._generate_single_turn(prompt_ids, *others, **more)
        self.use_vllm = corrects
        coarse = type(self.model)(self.model.config).bfloat16().eval()  # TRL has changed the forward of its own
        coarse.load_state_dict(self.model.state_dict())
        return completions, [
            log_probs(coarse, prompt, ids, self.temperature).tolist()
            for prompt, ids in zip(prompt_ids, completions, strict=True)
        ]


class Corrected(CoarseSampler):
    """With TRL's correction, which belongs to vLLM."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.use_vllm = True


def log_probs(model: Any, prompt: list[int], ids: list[int], temperature: float = 1.0) -> Tensor:
    logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].double()
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(ids)[:, None]).squeeze(1)


def prompts_of(step: Step) -> list[list[int]]:
    ends = step["prompt_offsets"]
    return [step["prompt_ids"][a:b].tolist() for a, b in pairwise(ends)]


def share_by_brute_force(model: Any, step: Step) -> float:
    """‖g_ρ − g_1‖ / ‖g_ρ‖ of the rollout, one response at a time; DAPO's mean over tokens cancels."""
    totals = [torch.zeros((), dtype=torch.float64) for _ in range(2)]
    for r in range(step.n_responses):
        own = log_probs(model, prompts_of(step)[step["group"][r]], step.tokens(r)["token_id"].tolist())
        advantage = float(step["advantage"][r])
        sampled = torch.tensor(step.tokens(r)["sampler_log_prob"]).double()
        for place, old in enumerate((sampled, own.detach())):
            ratio = (own - old).exp()
            totals[place] = totals[place] - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
    with_ratio, plain = (
        torch.cat([g.flatten() for g in torch.autograd.grad(total, list(model.parameters()), retain_graph=True)])
        for total in totals
    )
    return float((with_ratio - plain).norm() / with_ratio.norm())


def test_files_and_metrics_tell_how_far_they_differ_and_what_it_does_to_the_update(tmp_path: Path) -> None:
    trainer = grpo_trainer(tmp_path, CoarseSampler, dtype=torch.float64, learning_rate=0.0)
    attach(trainer, tmp_path / "run", on_error="raise", mismatch_every=1)
    trainer.train()
    run = gradtrace.open_run(tmp_path / "run")
    step = run.step("entropy_trace", 2)
    np.testing.assert_allclose(step["ratio"], np.exp(step["log_prob"] - step["sampler_log_prob"]), rtol=1e-4)
    first, second = run.metrics()[0]
    assert first["mismatch/max_ratio"] > 1.0 and "mismatch/share_of_update" not in first
    gap = step["log_prob"] - step["sampler_log_prob"]
    assert second["mismatch/kl"] == pytest.approx(-gap.mean(), abs=1e-6)
    expected = share_by_brute_force(trainer.model.eval(), step)
    assert expected > 1e-3 and second["mismatch/share_of_update"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_trls_correction_is_part_of_the_steps_gradient(mode: str, tmp_path: Path) -> None:
    bounds = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 1.002}
    model = train(tmp_path, bounds, Corrected, influence=UNSCALED, blame_every=1)
    step = step_of(tmp_path)
    ratios = [np.exp(step.tokens(r)["log_prob"] - step.tokens(r)["sampler_log_prob"]) for r in range(8)]
    if mode == "token_truncate":
        factors = [ratio.clip(max=1.002) for ratio in ratios]
    else:
        factors = [np.full(len(ratio), np.prod(ratio)) for ratio in ratios]
        factors = [np.where(factor > 1.002, 0.0, factor) for factor in factors]
    slopes = [torch.tensor(-step["advantage"][r] * factors[r]) for r in range(8)]
    assert_equal(step, engine_scores(model, step, UNSCALED, slopes=slopes), tolerance=1e-4)
    blame = gradtrace.open_run(tmp_path / "run").step("blame", 1)
    assert blame["grad_share"].sum() == pytest.approx(1.0, abs=1e-4)
