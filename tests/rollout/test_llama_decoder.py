"""The fast decoder computes what the model computes, and declines what it does not know."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradtrace.rollout import Sampler, SamplingParams, llama_weights
from gradtrace.rollout.decoder import ModelDecoder, Prompts
from gradtrace.rollout.llama_decoder import LlamaDecoder, supports

CPU = torch.device("cpu")


def lora(model: Any, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=3,
        lora_alpha=12,
        target_modules=["q_proj", "v_proj", "down_proj"],
        init_lora_weights=False,
        **options,
    )
    return get_peft_model(model, config).eval()


@torch.no_grad()
def assert_decoders_agree(model: Any, prompts: list[list[int]], rows: int, steps: int = 9) -> LlamaDecoder:
    """Logits of both decoders through steps and departures."""
    row_prompts = torch.arange(rows) % len(prompts)
    rectangle = Prompts(prompts, CPU)
    fast = LlamaDecoder(model, rectangle, row_prompts, steps + 3)
    plain = ModelDecoder(model, rectangle, row_prompts, steps + 3)
    torch.testing.assert_close(fast.first_logits, plain.first_logits)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        if step in (3, 4, 7):  # the last row fills the first hole; then a row in the middle leaves
            rows -= 1
            kept = torch.arange(rows)
            kept[step % rows] = rows
            fast.keep(kept)
            plain.keep(kept)
        tokens = torch.randint(24, (rows,), generator=generator)
        torch.testing.assert_close(fast.step(tokens), plain.step(tokens), atol=2e-5, rtol=1e-4)
    return fast


@pytest.fixture(params=["plain", "weights_first", "packed"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every order of weights and products, whatever this machine and the models' sizes would choose."""
    first = range(4, 49) if request.param == "weights_first" else range(0)
    monkeypatch.setattr(llama_weights, "WEIGHT_FIRST_ROWS", first)
    if request.param == "packed":
        if not torch.backends.mkldnn.is_available():
            pytest.skip("torch was built without oneDNN")
        monkeypatch.setattr(llama_weights, "PACKED_STEPS", 1)
        monkeypatch.setattr(llama_weights, "PACKED_WEIGHTS", range(1, 2**40))
    return str(request.param)


@pytest.mark.parametrize("rows", [5, 8, 51], ids=["to_few_rows", "some_rows", "to_some_rows"])
def test_logits_equal_those_of_the_model(llama_like: Any, prompts: list[list[int]], rows: int, order: str) -> None:
    assert supports(llama_like)
    decoder = assert_decoders_agree(llama_like, prompts, rows)
    linears = [
        decoder.head,
        *(layer.qkv for layer in decoder.layers),
        *(layer.up for layer in decoder.layers),
    ]
    assert all(linear.is_packed == (order == "packed") for linear in linears)


def test_packed_weights_are_those_of_the_moment(llama_like: Any, prompts: list[list[int]], order: str) -> None:
    assert_decoders_agree(llama_like, prompts, 5)
    with torch.no_grad():
        for parameter in llama_like.parameters():
            parameter.mul_(1.1)
    assert_decoders_agree(llama_like, prompts, 5)


def test_logits_equal_without_padding(llama_like: Any) -> None:
    assert_decoders_agree(llama_like, [[3, 7, 4], [5, 1, 2]], 6)


def test_logits_equal_while_the_cache_grows(llama_like: Any, prompts: list[list[int]]) -> None:
    decoder = assert_decoders_agree(llama_like, prompts, 8, steps=50)
    assert {cache.shape[1] for cache in decoder.cache} == {5}  # it grew, without the three rows that had left


def test_lora_adapters_are_part_of_the_weights(llama_like: Any, prompts: list[list[int]], order: str) -> None:
    adapted = lora(llama_like)
    assert supports(adapted)
    assert_decoders_agree(adapted, prompts, 6)
    with adapted.disable_adapter():
        assert supports(adapted)
        assert_decoders_agree(adapted, prompts, 6)
    adapted.merge_adapter()
    assert supports(adapted)
    assert_decoders_agree(adapted, prompts, 6)


def test_lora_changes_what_is_sampled(llama_like: Any, prompts: list[list[int]]) -> None:
    params = SamplingParams(max_new_tokens=6, temperature=0)
    before = Sampler(llama_like).generate(prompts, params)
    after = Sampler(lora(llama_like)).generate(prompts, params)
    assert not torch.equal(before.sampler_log_probs, after.sampler_log_probs)


def test_other_adapters_and_wrappers_take_the_model_forward(llama_like: Any) -> None:
    assert not supports(lora(llama_like, use_dora=True))


def test_hooks_take_the_model_forward(llama_like: Any) -> None:
    layer = llama_like.model.layers[1].mlp.down_proj
    handle = layer.register_forward_hook(lambda module, inputs, output: output * 2)
    assert not supports(llama_like)
    handle.remove()
    assert supports(llama_like)


def test_hooks_that_change_outputs_are_obeyed(llama_like: Any, prompts: list[list[int]]) -> None:
    params = SamplingParams(max_new_tokens=5, temperature=0)
    before = Sampler(llama_like).generate(prompts, params)
    llama_like.lm_head.register_forward_hook(lambda module, inputs, output: -output)
    after = Sampler(llama_like).generate(prompts, params)
    assert not torch.equal(before.responses, after.responses)


def test_replaced_forwards_take_the_model_forward(llama_like: Any) -> None:
    mlp = llama_like.model.layers[0].mlp
    mlp.forward = lambda x: x
    assert not supports(llama_like)


def test_subclasses_take_the_model_forward(llama_like: Any) -> None:
    class Changed(torch.nn.Linear):
        pass

    llama_like.lm_head.__class__ = Changed
    assert not supports(llama_like)


def test_other_precisions_take_the_model_forward(llama_like: Any) -> None:
    assert not supports(llama_like.to(torch.float64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_are_sampled(llama_like: Any, prompts: list[list[int]], dtype: torch.dtype) -> None:
    batch = Sampler(llama_like.to(dtype)).generate(prompts, SamplingParams(n=2, max_new_tokens=5))
    assert batch.sampler_log_probs.dtype == torch.float32
    assert (batch.response_lengths == 5).all()
