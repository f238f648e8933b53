"""Identity 1: Σ over all positions of u vᵀ is autograd's weight gradient, per module and per response."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradtrace.attribution import InfluenceConfig, InfluenceTracer
from tests.attribution.models import (
    FAMILIES,
    Responses,
    padded_objective,
    random_responses,
    tiny_model,
    token_log_probs,
)
from tests.attribution.scoring import assert_close, brute_force, capture, engine_scores, exact_config


def response_gradients(tracer: InfluenceTracer, response: int) -> dict[str, torch.Tensor]:
    return {
        block.parameter_name: block.weight_direction(tracer.factors._store.targets[block][response])
        / tracer.factors._captured.factors[response]  # without the mean over tokens
        for block in tracer.blocks
    }


def autograd_gradients(model: nn.Module, batch: Responses, response: int) -> dict[str, torch.Tensor]:
    model.zero_grad()
    padded_objective(model, batch, [response]).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients_match(model: nn.Module, batch: Responses, tracer: InfluenceTracer, tol: float = 1e-10) -> None:
    for response in range(len(batch)):
        ours, theirs = response_gradients(tracer, response), autograd_gradients(model, batch, response)
        for name, gradient in ours.items():
            error = float((gradient - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-12))
            assert error <= tol, f"{name}, response {response}: off by {error:.1e}"


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sum_over_positions_is_the_weight_gradient(family: str, tied: bool, packed: bool) -> None:
    model, batch = tiny_model(family, tied), random_responses()
    with InfluenceTracer(model, config=exact_config()) as tracer:
        capture(tracer, model, batch, [0, 1, 2, 3], packed=packed)
        capture(tracer, model, batch, [5, 4], packed=packed)
        assert len(tracer.blocks) == len([m for m in model.modules() if "Linear" in str(type(m)) or hasattr(m, "nf")])
        assert_gradients_match(model, batch, tracer)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_factor(reentrant: bool) -> None:
    model, batch = tiny_model(), random_responses()
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()  # reentrant checkpointing needs an input that requires grad
    with InfluenceTracer(model, config=exact_config()) as tracer:
        capture(tracer, model, batch, list(range(6)))
        model.gradient_checkpointing_disable()
        assert_gradients_match(model, batch, tracer)


def test_checkpointing_still_frees_the_inputs_of_traced_layers() -> None:
    """Capture must not keep alive what checkpointing drops: between forward and backward no layer input survives."""
    model, batch = tiny_model(layers=2), random_responses()
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    alive = []
    down = model.model.layers[0].mlp.down_proj
    with InfluenceTracer(model, config=exact_config()):
        import weakref

        handle = down.register_forward_pre_hook(lambda m, args: alive.append(weakref.ref(args[0])))
        loss = padded_objective(model, batch, [0, 1])
        handle.remove()
        assert alive[0]() is None, "the tracer holds on to an activation that checkpointing had dropped"
        loss.backward()


def test_lora_adapters_are_traced_and_frozen_base_layers_are_not() -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    base = tiny_model("qwen2")
    lora = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(base, lora).double()
    batch = random_responses()
    with InfluenceTracer(model, config=exact_config()) as tracer:
        names = [block.name for block in tracer.blocks]
        assert len(names) == 8 and all("lora_A" in name or "lora_B" in name for name in names)
        capture(tracer, model, batch, list(range(6)))
        assert_gradients_match(model, batch, tracer)


class Twice(nn.Module):
    """A module that runs one layer twice in a forward pass, as models with shared layers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(13, 8)
        self.shared = nn.Linear(8, 8)
        self.head = nn.Linear(8, 13)
        self.double()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> object:
        hidden = self.embedding(input_ids)
        hidden = hidden + torch.tanh(self.shared(hidden.cumsum(1) / 3))
        hidden = hidden + torch.tanh(self.shared(hidden))
        return type("Output", (), {"logits": self.head(hidden)})


@pytest.mark.parametrize("source", ["response", "token"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_module_called_twice_counts_twice(streaming: bool, source: str) -> None:
    model, batch = Twice(), random_responses(groups=1, n=4)
    config = exact_config(hessian_source=source)
    trace = engine_scores(model, batch, config, labels_at_capture=streaming)
    assert_close(trace.token_scores, brute_force(model, batch, config)[0])


def test_autocast_factors_give_the_weight_gradient_of_the_rounded_pass() -> None:
    model, batch = tiny_model().float(), random_responses()
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.float()
    with InfluenceTracer(model, config=exact_config()) as tracer:
        ids, attention, tokens, weights = batch.padded(list(range(6)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=ids, attention_mask=attention).logits
            loss = (token_log_probs(logits.float(), ids) * weights.float()).sum()
            with tracer.capture(response=torch.arange(6), tokens=tokens):
                loss.backward()
        for block in tracer.blocks:
            stored = tracer.factors._store.targets[block]
            total = torch.stack([stored[r] / tracer.factors._captured.factors[r] for r in range(6)]).sum(0)
            assert total.dtype == torch.float32
            actual = block.sites[0].module.weight.grad
            assert float((total - actual).norm() / actual.norm()) < 5e-3, block.name


def test_an_inplace_operation_on_the_logits_is_harmless() -> None:
    model, batch = tiny_model(), random_responses(groups=1)
    ids, attention, tokens, weights = batch.padded([0, 1, 2])
    config = exact_config(module_name_filter="lm_head")
    with InfluenceTracer(model, config=config) as tracer:
        logits = model(input_ids=ids, attention_mask=attention).logits
        logits.div_(0.7)  # verl does this
        with tracer.capture(response=torch.arange(3), tokens=tokens):
            (token_log_probs(logits, ids) * weights).sum().backward()
        stored, factors = tracer.factors._store.targets[tracer.blocks[0]], tracer.factors._captured.factors
        total = sum(stored[r] / factors[r] for r in range(3))
    assert torch.allclose(total, model.lm_head.weight.grad, atol=1e-12)


@pytest.mark.parametrize("how", ["logits_to_keep", "positions"])
def test_an_output_head_on_some_positions_gives_the_same_scores(how: str) -> None:
    model, batch = tiny_model(), random_responses(groups=1, n=4)
    ids, attention, tokens, weights = batch.padded([0, 1, 2, 3])
    rows = torch.arange(4)
    config = exact_config()
    whole = engine_scores(model, batch, config)
    with InfluenceTracer(model, config=config) as tracer:
        positions = None
        if how == "logits_to_keep":
            keep = ids.shape[1] - batch.prompt_lengths[0] + 1
            logits = model(input_ids=ids, attention_mask=attention, logits_to_keep=keep).logits
            scores = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, -keep + 1 :, None]).squeeze(-1)
            loss = (scores * weights[:, -keep + 1 :]).sum()
        else:
            hidden = model.model(input_ids=ids, attention_mask=attention).last_hidden_state
            row, column = tokens.nonzero(as_tuple=True)
            logits = model.lm_head(hidden[row, column - 1])
            scores = torch.log_softmax(logits, -1).gather(-1, ids[row, column, None]).squeeze(-1)
            loss = (scores * weights[row, column]).sum()
            positions = {"lm_head": row * ids.shape[1] + column - 1}
        with tracer.capture(response=rows, tokens=tokens, positions=positions):
            loss.backward()
        trace = tracer.score(accepted=batch.accepted, group=batch.group)
    assert_close(trace.token_scores, whole.token_scores)


def test_left_padding_gives_the_same_scores() -> None:
    model, batch = tiny_model(), random_responses(groups=1, n=4)
    config = exact_config()
    expected = engine_scores(model, batch, config)
    ids, attention, tokens, weights = batch.padded([0, 1, 2, 3])
    length = ids.shape[1]
    for row, sequence in enumerate(batch.sequences):
        for tensor in (ids, attention, tokens, weights):
            tensor[row] = tensor[row].roll(length - len(sequence))
    position_ids = (attention.cumsum(1) - 1).clamp(min=0)
    with InfluenceTracer(model, config=config) as tracer:
        logits = model(input_ids=ids, attention_mask=attention, position_ids=position_ids).logits
        with tracer.capture(response=torch.arange(4), tokens=tokens):
            (token_log_probs(logits, ids) * weights).sum().backward()
        trace = tracer.score(accepted=batch.accepted, group=batch.group)
    assert_close(trace.token_scores, expected.token_scores)


def test_whole_groups_are_scored_inside_the_backward_pass_and_nothing_is_stored() -> None:
    model, batch = tiny_model(), random_responses(groups=2, n=3)
    with InfluenceTracer(model, config=exact_config()) as tracer:
        capture(tracer, model, batch, [0, 1, 2], labels_at_capture=True)
        assert all(not stored for stored in tracer.factors._store.targets.values())
        capture(tracer, model, batch, [3, 4], labels_at_capture=True)
        assert all(set(stored) == {3, 4} for stored in tracer.factors._store.targets.values())


def test_passes_outside_a_capture_are_not_recorded() -> None:
    model, batch = tiny_model(), random_responses()
    with InfluenceTracer(model, config=InfluenceConfig.older()) as tracer:
        padded_objective(model, batch, [0, 1]).backward()
        with torch.no_grad():
            padded_objective(model, batch, [0, 1])
        assert all(not stored for stored in tracer.factors._store.targets.values())


def test_a_second_pass_through_a_kept_graph_can_be_captured() -> None:
    """Inputs are let go of as the backward pass moves on, but not while the graph is kept for another one."""
    model, batch = tiny_model(), random_responses()
    rows = list(range(len(batch)))
    _, _, tokens, _ = batch.padded(rows)
    with InfluenceTracer(model, config=exact_config()) as tracer:
        objective = padded_objective(model, batch, rows)
        objective.backward(retain_graph=True)
        with tracer.capture(response=torch.tensor(rows), tokens=tokens):
            objective.backward()
        assert_gradients_match(model, batch, tracer)


def test_max_modules_are_spread_over_the_depth() -> None:
    model = tiny_model(layers=4)
    config = InfluenceConfig.older(module_name_filter=("down_proj",), max_modules=2)
    with InfluenceTracer(model, config=config) as tracer:
        assert [block.name for block in tracer.blocks] == [
            "model.layers.1.mlp.down_proj",
            "model.layers.3.mlp.down_proj",
        ]


def test_the_output_head_is_traced_only_when_named() -> None:
    model = tiny_model()
    with InfluenceTracer(model, config=InfluenceConfig.older()) as tracer:
        assert not any("lm_head" in block.name for block in tracer.blocks)


@pytest.mark.parametrize("head", ["whole", "positions", "logits_to_keep"])
def test_ignored_rows_change_no_score(head: str) -> None:
    """Rows with response −1 are left out before anything is computed, whatever the module saw of them."""
    model, batch = tiny_model(tied=True), random_responses(groups=2, n=3)
    config = exact_config()
    alone = engine_scores(model, batch, config)
    ids, attention, tokens, weights = batch.padded(list(range(6)))
    with InfluenceTracer(model, config=config) as tracer:
        positions = None
        if head == "whole":
            logits = model(input_ids=ids, attention_mask=attention).logits
            loss = (token_log_probs(logits, ids) * weights).sum()
        elif head == "logits_to_keep":
            keep = ids.shape[1] - 1
            logits = model(input_ids=ids, attention_mask=attention, logits_to_keep=keep).logits
            scores = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 2:, None]).squeeze(-1)
            loss = (scores * weights[:, 2:]).sum()
        else:
            hidden = model.model(input_ids=ids, attention_mask=attention).last_hidden_state
            row, column = tokens.nonzero(as_tuple=True)
            scores = torch.log_softmax(model.lm_head(hidden[row, column - 1]), -1)
            loss = (scores.gather(-1, ids[row, column, None]).squeeze(-1) * weights[row, column]).sum()
            positions = {"lm_head": row * ids.shape[1] + column - 1}
        response = torch.tensor([-1, -1, -1, 0, 1, 2])
        with tracer.capture(response=response, tokens=tokens, positions=positions):
            loss.backward()
        trace = tracer.score(accepted=batch.accepted[3:], group=batch.group[3:])
    assert_close(trace.token_scores, alone.token_scores[3:])


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_every_response_can_have_a_scale_of_its_own(packed: bool) -> None:
    """A mean over sequences divides each response by its own length."""
    model, batch = tiny_model(), random_responses()
    config = exact_config(hessian_mode="identity")
    expected = engine_scores(model, batch, config)
    lengths = torch.tensor(batch.lengths(), dtype=torch.float64)
    for response in range(6):
        batch.weights[response] = batch.weights[response] / lengths[response]
    with InfluenceTracer(model, config=config) as tracer:
        ids, positions, response_ids, tokens, weights = batch.packed(list(range(6)))
        if packed:
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
            loss = (token_log_probs(logits, ids) * weights).sum()
        else:
            response_ids, tokens = torch.arange(6), batch.padded(list(range(6)))[2]
            loss = padded_objective(model, batch, list(range(6)))
        with tracer.capture(response=response_ids, tokens=tokens, scale=lengths):
            loss.backward()
        trace = tracer.score(accepted=batch.accepted, group=batch.group)
    assert_close(trace.token_scores, expected.token_scores)
