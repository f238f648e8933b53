"""Tools and environments of TRL: tokens that it masks are shown, have no scores, and the others' scores are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.integrations.trl_reference import EXACT, assert_equal, engine_scores, step_of, train
from tests.training.small import VOCABULARY

ENV = [VOCABULARY.index("="), VOCABULARY.index("7"), VOCABULARY.index("=")]


def in_two_turns(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """A rollout_func: the policy's tokens (random ones do), an environment's reply, the policy's again."""
    generator = torch.Generator().manual_seed(trainer.state.global_step)
    completions, masks = [], []
    for _ in prompts:
        first, second = (int(torch.randint(1, 4, (), generator=generator)) for _ in range(2))
        own = torch.randint(4, 17, (first + second,), generator=generator).tolist()
        completions.append([*own[:first], *ENV, *own[first:]])
        masks.append([1] * first + [0] * 3 + [1] * second)
    return {
        "prompt_ids": trainer.processing_class(prompts)["input_ids"],
        "completion_ids": completions,
        "logprobs": None,
        "env_mask": masks,
    }


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_scores_of_masked_completions_equal_the_engines(
    loss_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    setup = {"loss_type": loss_type, "max_completion_length": 12, "more": {"rollout_func": in_two_turns}}
    model = train(tmp_path, setup, blame_every=1)
    step = step_of(tmp_path)
    for r in range(step.n_responses):
        assert [part.role for part in step.segments(r)] == ["assistant", "environment", "assistant"]
        assert step.tokens(r)["token_id"][~step.written(r)].tolist() == ENV

    assert_equal(step, engine_scores(model, step, EXACT))
    entropy = step_of(tmp_path, kind="entropy_trace")
    for column in ("entropy", "log_prob"):
        assert np.array_equal(np.isnan(entropy[column]), ~entropy["loss_mask"])
    shares = step_of(tmp_path, kind="blame")["token_grad_share"]
    assert np.nansum(shares) == pytest.approx(1.0, abs=1e-4)
