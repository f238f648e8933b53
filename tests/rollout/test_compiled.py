"""A compiled model of fixed shapes samples what the model samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradtrace.errors import GradtraceError
from gradtrace.rollout import Sampler, SamplingParams
from gradtrace.rollout.decoder import CompiledModel
from tests.rollout.conftest import gpt2, llama, qwen3, seeded

PARAMS = SamplingParams(n=3, max_new_tokens=10, stop_token_ids=(0,))


def sampled(sampler: Sampler, prompts: list[list[int]]) -> Any:
    return sampler.generate(prompts, PARAMS, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("make", [llama, qwen3])
@pytest.mark.parametrize("padded", [True, False])
def test_compiled_decoding_samples_the_same(make: Any, padded: bool, prompts: list[list[int]]) -> None:
    prompts = prompts if padded else [[3, 7, 4], [9, 1, 2]]
    model = seeded(make)
    sampler = Sampler(model)
    expected = sampled(sampler, prompts)
    assert len(set(expected.response_lengths.tolist())) > 1, "rows should leave at different steps"
    sampler.compiled = CompiledModel(model, backend="aot_eager")
    found = sampled(sampler, prompts)
    assert torch.equal(found.responses, expected.responses)
    torch.testing.assert_close(found.sampler_log_probs, expected.sampler_log_probs, atol=1e-5, rtol=1e-5)


def test_a_compiled_model_sees_new_weights(prompts: list[list[int]]) -> None:
    model = seeded(llama)
    sampler = Sampler(model)
    sampler.compiled = CompiledModel(model, backend="aot_eager")
    sampled(sampler, prompts)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    found = sampled(sampler, prompts)
    assert torch.equal(found.responses, sampled(Sampler(model), prompts).responses)


def test_a_model_that_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = seeded(gpt2)
    monkeypatch.setattr(type(model), "_can_compile_fullgraph", False)
    with pytest.raises(GradtraceError, match=r"rollout\.compile=false"):
        Sampler(model, compiled=True)
