"""Tiny models of several architectures, with weights large enough that their distributions are far from uniform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 24
POSITIONS = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}


def gpt2(**changes: Any) -> Any:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=POSITIONS,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        **changes,
    )
    return GPT2LMHeadModel(config)


def llama(**changes: Any) -> Any:
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_key_value_heads": 2, **changes}))


def qwen2(**changes: Any) -> Any:
    model = Qwen2ForCausalLM(Qwen2Config(**{**SIZES, "num_key_value_heads": 4, "tie_word_embeddings": True, **changes}))
    for layer in model.model.layers:  # transformers starts them at zero, where they could be forgotten unseen
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            torch.nn.init.normal_(projection.bias)
    return model


def qwen3(**changes: Any) -> Any:
    model = Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "num_key_value_heads": 2, "head_dim": 16, **changes}))
    for layer in model.model.layers:
        torch.nn.init.uniform_(layer.self_attn.q_norm.weight, 0.5, 2)
        torch.nn.init.uniform_(layer.self_attn.k_norm.weight, 0.5, 2)
    return model


def mistral(**changes: Any) -> Any:
    return MistralForCausalLM(MistralConfig(**{**SIZES, "num_key_value_heads": 1, "sliding_window": None, **changes}))


def llama3_rope(**changes: Any) -> Any:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    return llama(rope_parameters=rope, attention_bias=True, mlp_bias=True, **changes)


LLAMA_FAMILY: dict[str, Callable[..., Any]] = {
    "llama": llama,
    "llama3_rope": llama3_rope,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mistral": mistral,
}
ARCHITECTURES: dict[str, Callable[..., Any]] = {
    **LLAMA_FAMILY,
    "gpt2": gpt2,
    "mistral_sliding_window": lambda: mistral(sliding_window=4),
}


def seeded(make: Callable[..., Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return make().eval()


@pytest.fixture(params=list(ARCHITECTURES))
def model(request: pytest.FixtureRequest) -> Any:
    """Every architecture in turn."""
    return seeded(ARCHITECTURES[request.param])


@pytest.fixture(params=list(LLAMA_FAMILY))
def llama_like(request: pytest.FixtureRequest) -> Any:
    """Every architecture that the fast decoder supports."""
    return seeded(LLAMA_FAMILY[request.param])


@pytest.fixture(params=["qwen2", "gpt2"])
def either(request: pytest.FixtureRequest) -> Any:
    """One model for each of the two decoders."""
    return seeded(ARCHITECTURES[request.param])


@pytest.fixture
def prompts() -> list[list[int]]:
    return [[3, 7, 4], [9], [5, 5, 6, 1, 2, 8, 10], [11, 12, 13], [14, 2]]
