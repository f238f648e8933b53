"""Written-out rotation and short attention are the model's own, in values, gradients and tangents."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from transformers import AutoConfig, AutoModelForCausalLM

from gradtrace.policy.attention import Packing, Rectangle, attend
from gradtrace.policy.cpu import attention as cpu_attention
from gradtrace.policy.cpu.attention import SAME_FORMULA, Rotate, use_fast_rotation
from gradtrace.rollout import llama_decoder


def math_kernel() -> Any:
    """The attention kernel that has second derivatives."""
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)


def small_model(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, vocab_size=18, **size, **heads, **options))


def test_derivatives_of_a_rotation_agree_with_finite_differences() -> None:
    torch.manual_seed(0)
    x, cos, sin = (
        torch.randn(2, 3, 2, 6).double(),
        torch.randn(2, 3, 1, 6).double(),
        torch.randn(2, 3, 1, 6).double(),
    )

    def rotate(x: Tensor) -> Tensor:
        return Rotate.apply(x, cos, sin)

    plain = x * cos + torch.cat((-x[..., 3:], x[..., :3]), -1) * sin
    torch.testing.assert_close(rotate(x), plain)
    assert torch.autograd.gradcheck(rotate, x.requires_grad_(), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(rotate, x)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2"])
def test_a_model_with_fast_rotation_is_the_same_model(name: str, window: int | None) -> None:
    options: dict[str, Any] = {} if name == "llama" else {"sliding_window": window}
    if name == "qwen2":
        options |= {"use_sliding_window": window is not None, "max_window_layers": 1}
    plain = small_model(name, **options)
    assert any(type(module).__name__ in SAME_FORMULA for module in plain.modules())
    fast = copy.deepcopy(plain)
    use_fast_rotation(fast)
    assert any("forward" in vars(module) for module in fast.modules())
    ids = torch.randint(0, 18, (3, 9))
    for implementation in ("sdpa", "eager"):
        for model in (plain, fast):
            model.set_attn_implementation(implementation)
            model.zero_grad()
        losses = [model(ids, labels=ids, use_cache=False).loss for model in (plain, fast)]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
        for (label, expected), found in zip(plain.named_parameters(), fast.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-6, msg=label)
    with torch.no_grad():
        texts = [model.generate(ids, max_new_tokens=5, do_sample=False) for model in (plain, fast)]
    assert torch.equal(*texts), "with a cache"
    assert llama_decoder.supports(fast) == llama_decoder.supports(plain), "the sampler lost its fast path"


def test_models_in_other_dtypes_keep_their_own_attention() -> None:
    model = small_model("llama").to(torch.bfloat16)
    use_fast_rotation(model)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("prompts", [(3, 3, 3), (1, 4, 2)], ids=["equal prompts", "padded prompts"])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_short_attention_is_the_fused_kernels(
    prompts: tuple[int, ...], key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values, gradients, gradients of gradients and tangents, with responses of unequal lengths."""
    torch.manual_seed(0)
    lengths = torch.tensor([5, 1, 3, 2, 5, 4])
    positions = sum(prompts) + int(lengths.sum())
    inputs = [
        torch.randn(1, heads, positions, 6, dtype=torch.float64, requires_grad=True)
        for heads in (4, key_heads, key_heads)
    ]

    def output(*inputs: Tensor) -> Tensor:
        packing = Packing(
            Rectangle.of(lengths), Rectangle.of(torch.tensor(prompts)), torch.arange(3).repeat_interleave(2)
        )
        return attend(None, *inputs, None, scaling=0.4, packing=packing)[0]

    def everything() -> list[Tensor]:
        value = output(*inputs)
        gradients = torch.autograd.grad((value**3).sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum((gradient**2).sum() for gradient in gradients), inputs)
        return [value, *gradients, *second]

    with math_kernel():
        short = everything()
    monkeypatch.setattr(cpu_attention, "LONGEST", 0)
    with math_kernel():
        fused = everything()
    for found, expected in zip(short, fused, strict=True):
        torch.testing.assert_close(found, expected)
    step = 1e-5
    for moving in ({0, 1, 2}, {0}, {1}, {2}):  # adapters may be on one of the projections alone
        directions = [x.detach().cos() if i in moving else None for i, x in enumerate(inputs)]
        monkeypatch.undo()
        with math_kernel(), forward_ad.dual_level(), torch.no_grad():
            duals = [x if d is None else forward_ad.make_dual(x, d) for x, d in zip(inputs, directions, strict=True)]
            tangent = forward_ad.unpack_dual(output(*duals)).tangent
        ahead, behind = (
            output(*(x if d is None else x + sign * step * d for x, d in zip(inputs, directions, strict=True)))
            for sign in (1, -1)
        )
        torch.testing.assert_close(tangent, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-8)


def test_unequal_shares_of_a_prompt_take_the_other_way() -> None:
    lengths, prompts = Rectangle.of(torch.tensor([2, 3, 1])), Rectangle.of(torch.tensor([2, 2]))
    assert Packing(lengths, prompts, torch.tensor([0, 0, 1])).short is None
    assert Packing(lengths, prompts, torch.tensor([0, 1, 1])).short is None
    assert Packing(Rectangle.of(torch.tensor([2, 3])), prompts, torch.tensor([1, 0])).short is None
    assert Packing(Rectangle.of(torch.tensor([2, 3])), prompts, torch.tensor([0, 1])).short is not None
