"""Models that are more than a stack of linear layers: what is traced of them is exact, what is not is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from gradtrace.attribution import AttributionError, InfluenceConfig, InfluenceTracer, directional_derivative
from tests.attribution.models import VOCAB, _exact_norms, random_responses, tiny_model
from tests.attribution.scoring import assert_close, brute_force, engine_scores, exact_config

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 12,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
    "tie_word_embeddings": False,
}


def mixture(family: str, **options: Any) -> Any:
    torch.manual_seed(0)
    if family == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**{**SHAPE, **options}, num_local_experts=4, num_experts_per_tok=2))
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    widths = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 12}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**{**SHAPE, **options}, **experts, **widths))


def exact(model: Any) -> Any:
    """In float64, where grouped products of experts do not exist."""
    model.set_experts_implementation("eager")
    return _exact_norms(model.double()).eval()


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral"])
def test_layers_around_experts_equal_brute_force_and_the_experts_are_named(family: str) -> None:
    model, batch = exact(mixture(family)), random_responses()
    config = exact_config(credit="both")
    trace = engine_scores(model, batch, config)
    names = [block.name for block in InfluenceTracer(model, config=config).blocks]
    assert any("shared_expert" in name for name in names) == (family == "qwen2_moe")
    assert_close(trace.position_scores, brute_force(model, batch, config)[0])
    # the router's softmax is in float32
    assert_close(trace.loss_term_scores, brute_force(model, batch, config, credit="loss_term")[0], 1e-6)
    (said,) = [line for line in trace.warnings if "experts" in line]
    fused = sum(p.numel() for p in model.parameters() if p.dim() == 3)
    assert f"{fused / sum(p.numel() for p in model.parameters()):.0%}" in said and "gate_up_proj" in said


def test_derivatives_go_through_grouped_products_of_experts() -> None:
    """Forward mode does not: inside a derivative experts run one by one, and as before afterwards."""
    model = mixture("mixtral", hidden_size=16, intermediate_size=16).eval()
    assert model.config._experts_implementation == "grouped_mm"
    direction = {"model.layers.0.self_attn.q_proj.weight": torch.randn(16, 16)}
    ids = torch.randint(0, VOCAB, (2, 5))
    found = [
        directional_derivative(model, lambda: model(input_ids=ids).logits, direction, method)
        for method in ("jvp", "finite_difference")
    ]
    torch.testing.assert_close(found[0], found[1], rtol=0.02, atol=0.02 * float(found[0].abs().max()))
    assert model.config._experts_implementation == "grouped_mm"


def chunked_cross_entropy(model: Any, ids: Tensor, chunk: int = 3) -> Tensor:
    """[S − 1]: log-probs of the next tokens as fused losses compute them: from hidden states and the head's weight,
    part by part; the head itself never runs, and no logits of the whole sequence exist."""
    hidden = model.model(input_ids=ids).last_hidden_state[0, :-1]
    parts = zip(hidden.split(chunk), ids[0, 1:].split(chunk), strict=True)
    found = [torch.log_softmax(h @ model.lm_head.weight.T, -1).gather(1, t[:, None])[:, 0] for h, t in parts]
    return torch.cat(found)


def test_a_loss_without_logits_has_the_same_scores_and_its_head_cannot_be_traced() -> None:
    model, batch = tiny_model("llama"), random_responses()
    for name in ("", "lm_head"):
        config = exact_config(module_name_filter=name or ())
        usual = engine_scores(model, batch, config)
        with InfluenceTracer(model, config=config) as tracer:
            for r, ids in enumerate(batch.sequences):
                terms = chunked_cross_entropy(model, ids[None])[batch.prompt_lengths[r] - 1 :] * batch.weights[r]
                tokens = torch.zeros(1, len(ids), dtype=torch.bool)
                tokens[0, batch.places(r)] = True
                with tracer.capture(response=torch.tensor([r]), tokens=tokens):
                    terms.sum().backward()
            if name:
                with pytest.raises(AttributionError, match="no hook of the 1 traced layers fired"):
                    tracer.score(accepted=batch.accepted, group=batch.group)
            else:
                fused = tracer.score(accepted=batch.accepted, group=batch.group)
                assert_close(fused.position_scores, usual.position_scores)


def test_the_text_path_of_a_vision_language_model_equals_brute_force() -> None:
    torch.manual_seed(0)
    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 8}
    text = {
        **SHAPE,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]},
    }
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    special = dict.fromkeys(names, VOCAB - 1)
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **special))
    model, batch = _exact_norms(model.double()).eval(), random_responses()
    batch.sequences = [ids % (VOCAB - 1) for ids in batch.sequences]
    config = exact_config(credit="both", module_name_filter="language_model")
    trace = engine_scores(model, batch, config)
    assert_close(trace.position_scores, brute_force(model, batch, config)[0])
    assert_close(trace.loss_term_scores, brute_force(model, batch, config, credit="loss_term")[0])
    with pytest.warns(UserWarning, match="received no gradient, the first is model.visual"):
        everything = engine_scores(model, batch, exact_config(module_name_filter="visual|language_model"))
    assert_close(everything.position_scores, trace.position_scores)


class Int8Linear(nn.Linear):
    """A frozen layer whose weight is stored in 8 bits, as those of bitsandbytes are: a linear layer by type."""

    @staticmethod
    def of(layer: nn.Linear) -> Int8Linear:
        found = Int8Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        found.register_buffer("scale", scale)
        found.weight = nn.Parameter((layer.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        found.bias = layer.bias
        return found

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def test_adapters_on_a_quantised_base_equal_brute_force() -> None:
    peft = pytest.importorskip("peft")
    base, batch = tiny_model("llama"), random_responses()
    for path, layer in [(p, m) for p, m in base.named_modules() if p.endswith("_proj")]:
        parent, _, child = path.rpartition(".")
        setattr(base.get_submodule(parent), child, Int8Linear.of(layer))
    settings = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj", "down_proj"])
    model = peft.get_peft_model(base, settings).double().eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros at first, which give lora_A no gradient
            nn.init.normal_(parameter, std=0.3)
    assert any(p.dtype == torch.int8 for p in model.parameters())
    config = exact_config(credit="both", module_name_filter="lora_")
    trace = engine_scores(model, batch, config)
    assert len(trace.position_scores[0]) and float(trace.position_scores[0].abs().max()) > 0
    assert_close(trace.position_scores, brute_force(model, batch, config)[0])
    assert_close(trace.loss_term_scores, brute_force(model, batch, config, credit="loss_term")[0])
    default = InfluenceTracer(model, config=InfluenceConfig(credit="position"))
    assert all("lora_" in block.name for block in default.blocks), "without a filter frozen layers are passed over"
