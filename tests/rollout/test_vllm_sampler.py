"""vLLM's adapter against a stand-in with vLLM's calls: a model that knows only what it is handed."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from gradtrace.config.loader import load_config
from gradtrace.errors import GradtraceError
from gradtrace.rollout import Sampler, SamplingParams
from gradtrace.rollout.turns import Start
from gradtrace.rollout.vllm_sampler import VllmSampler
from tests.rollout.conftest import llama, qwen2, seeded
from tests.rollout.test_sampler import responses_of, teacher_forced_log_probs

PARAMS = SamplingParams(n=3, max_new_tokens=9, temperature=0.7, stop_token_ids=(0,))


@dataclass
class StandIn:
    """What the adapter asks of `vllm.LLM`, answered by our sampler on a copy of the weights."""

    model: Any
    handed: list[int] = field(default_factory=list)
    """Addresses of the tensors that came in the last hand-over."""
    resets: int = 0

    @property
    def llm_engine(self) -> Any:
        runner = SimpleNamespace(model=self)
        return SimpleNamespace(model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner)))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        parameters, self.handed = dict(self.model.named_parameters()), []
        for name, weight in weights:
            self.handed.append(weight.data_ptr())
            parameters[name].data.copy_(weight)

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def generate(self, prompts: list[dict[str, Any]], params: list[Any], use_tqdm: bool) -> list[Any]:
        found = []
        for prompt, wanted in zip(prompts, params, strict=True):
            own = SamplingParams(
                wanted.n,
                wanted.max_tokens,
                wanted.temperature,
                wanted.top_p,
                wanted.top_k,
                wanted.stop_token_ids,
            )
            generator = torch.Generator().manual_seed(wanted.seed)
            batch = Sampler(self.model).generate([prompt["prompt_token_ids"]], own, generator)
            completions = []
            for row, tokens in enumerate(responses_of(batch)):
                log_probs = batch.sampler_log_probs[row].tolist()
                known = [{t: SimpleNamespace(logprob=p)} for t, p in zip(tokens, log_probs, strict=False)]
                reason = "stop" if batch.finished[row] else "length"
                completions.append(SimpleNamespace(token_ids=tuple(tokens), logprobs=known, finish_reason=reason))
            found.append(SimpleNamespace(outputs=completions))
        return found


@pytest.fixture
def sampler() -> VllmSampler:
    model = seeded(qwen2)
    engine = StandIn(copy.deepcopy(model))
    return VllmSampler(model, engine=engine, make_params=SimpleNamespace)


def generate(sampler: Sampler, prompts: list[list[int]]) -> Any:
    return sampler.generate(prompts, PARAMS, torch.Generator().manual_seed(0))


def test_responses_and_log_probs_are_those_of_the_current_weights(
    sampler: VllmSampler, prompts: list[list[int]]
) -> None:
    with torch.no_grad():  # as an optimizer step between two rollouts
        for parameter in sampler.model.parameters():
            parameter.mul_(1.2)
    batch = generate(sampler, prompts)
    for row, response in enumerate(responses_of(batch)):
        prompt = prompts[int(batch.group[row])]
        expected = teacher_forced_log_probs(sampler.model, prompt, response, PARAMS.temperature)
        torch.testing.assert_close(batch.sampler_log_probs[row, : len(response)], expected, atol=1e-5, rtol=1e-5)
        assert bool(batch.finished[row]) == (response[-1] == 0)


def test_weights_are_handed_over_as_they_lie_in_memory(sampler: VllmSampler, prompts: list[list[int]]) -> None:
    generate(sampler, prompts)
    assert sampler.engine.handed == [p.data_ptr() for p in sampler.model.parameters()]
    assert sampler.engine.resets == 1


def test_the_generator_decides_what_is_sampled(sampler: VllmSampler, prompts: list[list[int]]) -> None:
    first, again = generate(sampler, prompts), generate(sampler, prompts)
    assert torch.equal(first.responses, again.responses)
    other = sampler.generate(prompts, PARAMS, torch.Generator().manual_seed(1))
    assert not torch.equal(first.responses[:, :1], other.responses[:, :1])


def test_what_it_cannot_do_is_refused(sampler: VllmSampler) -> None:
    with pytest.raises(GradtraceError, match=r"rollout\.engine=embedded"):
        sampler.respond([Start([3], 1, 4, banned=(2,))], PARAMS)
    with pytest.raises(GradtraceError, match=r"model\.device=cuda"):
        VllmSampler(seeded(llama))
    adapted = peft.get_peft_model(seeded(llama), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(GradtraceError, match="LoRA"):
        VllmSampler(adapted)
    with pytest.raises(GradtraceError, match=r"rollout\.engine=vllm"):
        load_config(["rollout.engine=vllm", "rollout.compile=true"])
