"""The formulas behind docs/scaling.md against what really happens."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import _verl_cost_model as cost_model
from benchmarks._verl_cost_model import ModelShape, Workload
from gradtrace.attribution import InfluenceConfig, InfluenceTracer
from tests.training import small

SHAPE = ModelShape("tiny", layers=2, hidden=16, intermediate=32, heads=2, kv_heads=2, head_dim=8, vocabulary=18)
LOAD = Workload(responses=4, group_size=4, prompt_tokens=6, response_tokens=10)


def passes(config: InfluenceConfig | None) -> tuple[int, InfluenceTracer | None]:
    """FLOPs of a forward and backward pass, captured or not, and the tracer before it scores."""
    model = small.model(torch.float32, tie_word_embeddings=False)
    ids = torch.randint(3, 18, (LOAD.responses, LOAD.prompt_tokens + LOAD.response_tokens))
    tokens = torch.arange(ids.shape[1]).expand(ids.shape) >= LOAD.prompt_tokens
    tracer = None if config is None else InfluenceTracer(model, config=config)
    counter = FlopCounterMode(display=False)
    with counter:
        loss = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)[..., 0].sum()
        if tracer is None:
            loss.backward()
        else:
            with tracer.capture(response=torch.arange(LOAD.responses), tokens=tokens):
                loss.backward()
    return counter.get_total_flops(), tracer


def test_training_flops_are_counted_right() -> None:
    measured, _ = passes(None)
    assert abs(cost_model.training_flops(SHAPE, LOAD) / measured - 1) < 0.1


def test_parts_cost_two_forward_passes_and_a_copy_of_the_weights() -> None:
    """In a custom loop: one at the weights, one at the moved weights."""
    model = small.model(torch.float32, tie_word_embeddings=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    ids = torch.randint(3, 18, (LOAD.responses, LOAD.prompt_tokens + LOAD.response_tokens))

    def terms() -> list[torch.Tensor]:
        return list(model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[..., 0])

    torch.cat(terms()).sum().backward()
    with FlopCounterMode(display=False) as counter:
        InfluenceTracer(model, optimizer).parts(terms)
    assert abs(2 * cost_model.forward_flops(SHAPE, LOAD) / counter.get_total_flops() - 1) < 0.1
    stored = sum(4 * p.numel() for p in model.parameters() if p.dim() == 2)
    assert cost_model.copy_bytes_per_rank(SHAPE.parameters, 1) == stored


def test_parameters_and_projections_are_those_of_the_model() -> None:
    model = small.model(torch.float32, tie_word_embeddings=False)
    counted = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2)
    assert SHAPE.parameters == counted
    for factor in (0, 4):
        tracer = InfluenceTracer(model, config=InfluenceConfig.older(projection_dim_factor=factor))
        assert cost_model.response_gradient_entries(SHAPE, factor) == sum(b.dim for b in tracer.blocks)
        tracer.close()


def test_capture_costs_what_the_formula_says() -> None:
    """With factors whose projected sides are eight and more: narrower ones are filled up with zeros, which the formula
    leaves out."""
    plain, _ = passes(None)
    for factor in (0, 2):
        captured, _ = passes(InfluenceConfig.older(projection_dim_factor=factor))
        extra = captured - plain
        assert abs(cost_model.capture_flops(SHAPE, LOAD, factor) / extra - 1) < 0.05, factor


def test_stored_factors_have_the_size_that_the_formula_says() -> None:
    _, tracer = passes(InfluenceConfig.older(projection_dim_factor=4))
    assert tracer is not None
    gradients = [g for found in tracer.factors._store.targets.values() for g in found.values()]
    tokens = [
        side for found in tracer.factors._store.tokens.values() for part in found.values() for side in (part.u, part.v)
    ]
    stored = sum(tensor.numel() for tensor in gradients + tokens)
    assert cost_model.stored_factor_bytes(SHAPE, LOAD, 4, workers=1) == 4 * stored


def test_the_tables_in_the_docs_are_what_the_formulas_give() -> None:
    page = Path(__file__).parents[3] / "docs" / "scaling.md"
    for line in (cost_model.parts_table() + "\n" + cost_model.table()).splitlines():
        assert line in page.read_text(), f"docs/scaling.md lacks {line!r}: python -m benchmarks._verl_cost_model"
