"""A model in float64 has no step in float32 inside, wherever effects of single tokens are measured.

transformers computes norms, softmaxes and rotary angles in float32 whatever the dtype: noise of 1e-8, more than what
most tokens do.
"""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradtrace.policy.microbatch import MicroBatches
from gradtrace.policy.policy import KeepDouble, Policy
from tests.training import small

SHAPE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Mistral": {},
    "Gemma2": {"head_dim": 8},
    "Phi3": {},
    "SmolLM3": {},
    "Olmo2": {},
    "Lfm2": {},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
}


class Rounded(TorchDispatchMode):
    """Where a tensor of less than float64 is made."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for value in tree_leaves(output):
            if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64:
                place = traceback.extract_stack(limit=30)
                named = [f"{f.filename}:{f.lineno}" for f in place if "transformers" in f.filename]
                self.found[str(func)] = named[-1] if named else "somewhere"
        return output


def model_of(family: str, attention: str) -> Any:
    torch.manual_seed(0)
    if family == "GPT2":
        sizes = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    else:
        config = getattr(transformers, f"{family}Config")(**{**SHAPE, **FAMILIES[family]})
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.set_attn_implementation(attention)
    if "Mo" in family or family == "Mixtral":
        model.set_experts_implementation("eager")  # grouped products have no float64
    return model.double().eval()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["GPT2", *FAMILIES])
def test_forward_and_backward_pass_stay_in_float64(family: str, attention: str) -> None:
    model = model_of(family, attention)
    ids = torch.randint(1, 32, (2, 7))
    rounded = Rounded()
    with rounded, KeepDouble():
        log_probs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits, -1)
        log_probs.gather(-1, ids[..., None]).sum().backward()
    assert rounded.found == {}
    assert all(p.grad.dtype == torch.float64 for p in model.parameters() if p.grad is not None)


def test_without_it_norms_are_rounded() -> None:
    """So that the test above can fail."""
    rounded = Rounded()
    with rounded:
        model_of("Llama", "sdpa")(input_ids=torch.randint(1, 32, (2, 7)), use_cache=False)
    assert any("llama" in place for place in rounded.found.values())


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_passes_of_a_policy_in_full_precision_stay_in_float64(layout: Any) -> None:
    model = small.model(torch.float64)
    policy, batch = Policy(model, torch.device("cpu"), 1.0, full_precision=True), small.random_batch()
    rounded = Rounded()
    for micro in MicroBatches(batch, 10**6, layout)(torch.arange(len(batch))):
        with rounded:
            statistics = policy.statistics(micro)
        assert all(values.dtype == torch.float64 for values in statistics)
    assert rounded.found == {}
