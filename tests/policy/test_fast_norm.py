"""The written-out RMSNorm is the model's own, in values, gradients and tangents."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gradtrace.policy.cpu import accelerated
from gradtrace.policy.cpu.norm import SAME_FORMULA, RmsNorm, use_fast_norms
from gradtrace.rollout import llama_decoder


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 8), (2, 3, 4, 6)])
def test_derivatives_agree_with_finite_differences(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(shape[-1], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: RmsNorm.apply(x, w, 1e-6), (x, weight), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda x, w: RmsNorm.apply(x, w, 1e-6), (x, weight))
    if x.dim() > 2:  # a gradient that arrives transposed
        assert torch.autograd.gradcheck(lambda x, w: RmsNorm.apply(x, w, 1e-6).transpose(0, 1).clone(), (x, weight))


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_model_with_fast_norms_is_the_same_model(name: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        name,
        vocab_size=18,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        head_dim=8,
    )
    plain = AutoModelForCausalLM.from_config(config)
    assert any(type(module).__name__ in SAME_FORMULA for module in plain.modules())
    fast = copy.deepcopy(plain)
    use_fast_norms(fast)
    assert any("forward" in vars(module) for module in fast.modules())
    ids = torch.randint(0, 18, (3, 9))
    losses = [model(ids, labels=ids).loss for model in (plain, fast)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for (label, expected), found in zip(plain.named_parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-6, msg=label)
    assert plain.state_dict().keys() == fast.state_dict().keys()
    assert llama_decoder.supports(fast) == llama_decoder.supports(plain), "the sampler lost its fast path"


def test_models_in_other_dtypes_keep_their_own_norms() -> None:
    size = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
    config = AutoConfig.for_model("qwen2", vocab_size=18, num_hidden_layers=1, **size)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    use_fast_norms(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_operations_are_lent_for_a_time_and_none_is_taken_from_others() -> None:
    size = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
    config = AutoConfig.for_model("qwen2", vocab_size=18, num_hidden_layers=1, **size)
    model = AutoModelForCausalLM.from_config(config)
    own = model.model.norm.forward = type(model.model.norm).forward.__get__(model.model.norm)
    with pytest.raises(KeyError), accelerated(model):
        assert sum("forward" in vars(module) for module in model.modules()) == 4  # three norms and the attention
        assert model.model.norm.forward is own
        raise KeyError
    assert [module for module in model.modules() if "forward" in vars(module)] == [model.model.norm]
