"""Bad input gets an error that names the cause, or a documented skip; nothing is silently wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradtrace.attribution import AttributionError, InfluenceConfig, InfluenceTracer
from gradtrace.attribution.config import FACTOR_KNOBS
from tests.attribution.models import padded_objective, random_responses, tiny_model
from tests.attribution.scoring import capture, engine_scores, exact_config


@pytest.fixture
def model() -> nn.Module:
    return tiny_model()


def masks(rows: int = 2, length: int = 5) -> torch.Tensor:
    tokens = torch.zeros(rows, length, dtype=torch.bool)
    tokens[:, 2:] = True
    return tokens


@pytest.mark.parametrize(
    "response, tokens, message",
    [
        (torch.arange(3), masks(), "one id per row"),
        (torch.arange(2), masks().long(), "bool"),
        (torch.arange(2), masks()[0], "bool"),
        (torch.tensor([0.0, 1.0]), masks(), "integer"),
        (torch.tensor([0, -2]), masks(), "smaller"),
        (torch.tensor([0, 0]), masks(), "two rows"),
        (torch.arange(2), torch.ones(2, 5, dtype=torch.bool), "no position before it"),
        (
            torch.tensor([[0, 0, 0, 1, 1]]),
            torch.tensor([[False, True, True, True, True]]),
            "another response",
        ),
    ],
)
def test_a_mask_that_cannot_be_right_is_refused(
    model: nn.Module, response: torch.Tensor, tokens: torch.Tensor, message: str
) -> None:
    with (
        InfluenceTracer(model, config=exact_config()) as tracer,
        pytest.raises(AttributionError, match=message),
        tracer.capture(response=response, tokens=tokens),
    ):
        pass


def test_a_mask_of_another_batch_is_refused_in_the_backward_pass(model: nn.Module) -> None:
    batch = random_responses()
    with InfluenceTracer(model, config=exact_config()) as tracer:
        loss = padded_objective(model, batch, [0, 1, 2])
        with (
            pytest.raises(AttributionError, match="batch that is going backward"),
            tracer.capture(response=torch.arange(2), tokens=masks(2, 30)),
        ):
            loss.backward()


def test_a_response_id_out_of_range_is_refused(model: nn.Module) -> None:
    batch = random_responses()
    with InfluenceTracer(model, config=exact_config()) as tracer:
        capture(tracer, model, batch, [0, 5])
        with pytest.raises(AttributionError, match="response id 5"):
            tracer.score(accepted=batch.accepted[:4], group=batch.group[:4])
    with (
        InfluenceTracer(model, config=exact_config()) as tracer,
        pytest.raises(AttributionError, match="response id 5 is out of range"),
        tracer.capture(
            response=torch.tensor([0, 5]), tokens=masks(), accepted=batch.accepted[:4], group=batch.group[:4]
        ),
    ):
        pass


def test_a_response_captured_twice_is_refused(model: nn.Module) -> None:
    batch = random_responses()
    with InfluenceTracer(model, config=exact_config()) as tracer:
        capture(tracer, model, batch, [0, 1])
        with pytest.raises(AttributionError, match="captured already"):
            capture(tracer, model, batch, [1, 2])


def test_labels_that_change_between_captures_are_refused(model: nn.Module) -> None:
    batch = random_responses()
    with InfluenceTracer(model, config=exact_config()) as tracer:
        capture(tracer, model, batch, [0, 1], labels_at_capture=True)
        with pytest.raises(AttributionError, match="differ"):
            tracer.score(accepted=~batch.accepted, group=batch.group)


def test_constant_groups_are_skipped_and_counted(model: nn.Module) -> None:
    batch = random_responses()
    batch.accepted[:] = True
    with pytest.warns(UserWarning, match="no contrast"):
        trace = engine_scores(model, batch, exact_config())
    assert trace.skipped == {0: "constant_reward", 1: "constant_reward"}
    assert all(scores.numel() == 0 for scores in trace.token_scores)
    assert trace.metrics["influence_trace/uid_constant"] == 2


def test_a_group_with_a_missing_response_is_skipped_with_the_reason(model: nn.Module) -> None:
    batch = random_responses()
    trace = engine_scores(model, batch, exact_config(), splits=[[0, 1, 2, 3, 4]])
    assert trace.skipped == {1: "not_captured"}
    assert trace.token_scores[0].numel() > 0 and trace.token_scores[3].numel() == 0


@pytest.mark.parametrize("streamed", [False, True])
def test_a_nan_gradient_costs_its_group_and_no_other(model: nn.Module, streamed: bool) -> None:
    batch = random_responses()
    clean = engine_scores(model, batch, exact_config(), labels_at_capture=streamed)
    batch.weights[4] = torch.full_like(batch.weights[4], torch.nan)
    with pytest.warns(UserWarning, match=r"response 4 .* not finite"):
        trace = engine_scores(model, batch, exact_config(), labels_at_capture=streamed, splits=[[0, 1, 2], [3, 4, 5]])
    assert trace.skipped == {1: "non_finite"}
    assert trace.metrics["influence_trace/debug_groups_non_finite"] == 1
    for r in range(3):
        assert torch.allclose(trace.token_scores[r], clean.token_scores[r])
        assert trace.token_scores[r + 3].numel() == 0


def test_nothing_captured_is_an_error(model: nn.Module) -> None:
    with (
        InfluenceTracer(model, config=exact_config()) as tracer,
        pytest.raises(AttributionError, match="nothing was captured"),
    ):
        tracer.score(accepted=torch.tensor([True, False]), group=torch.zeros(2, dtype=torch.long))


def test_a_backward_pass_that_fires_no_hook_is_an_error_that_says_why(model: nn.Module) -> None:
    batch = random_responses(groups=1)
    loss = padded_objective(model, batch, [0, 1, 2])  # before the tracer exists
    with InfluenceTracer(model, config=exact_config()) as tracer:
        with tracer.capture(response=torch.arange(3), tokens=batch.padded([0, 1, 2])[2]):
            loss.backward()
        with pytest.raises(AttributionError, match=r"no hook .* fired"):
            tracer.score(accepted=batch.accepted, group=batch.group)


def test_hooks_that_come_after_torch_compile_do_not_fire_and_it_is_said(model: nn.Module) -> None:
    """Therefore TRL with torch_compile is refused."""
    compiled, batch = torch.compile(model, backend="eager"), random_responses(groups=1)
    padded_objective(compiled, batch, [0, 1, 2])  # type: ignore[arg-type]
    with InfluenceTracer(model, config=exact_config()) as tracer:
        with tracer.capture(response=torch.arange(3), tokens=batch.padded([0, 1, 2])[2]):
            padded_objective(compiled, batch, [0, 1, 2]).backward()  # type: ignore[arg-type]
        with pytest.raises(AttributionError, match=r"no hook .* fired.*torch\.compile"):
            tracer.score(accepted=batch.accepted, group=batch.group)


def test_autograd_grad_towards_the_weights_fires_the_hooks(model: nn.Module) -> None:
    batch = random_responses(groups=1)
    with InfluenceTracer(model, config=exact_config()) as tracer:
        with tracer.capture(response=torch.arange(3), tokens=batch.padded([0, 1, 2])[2]):
            torch.autograd.grad(padded_objective(model, batch, [0, 1, 2]), model.model.embed_tokens.weight)
        trace = tracer.score(accepted=batch.accepted, group=batch.group)
    assert trace.metrics["influence_trace/debug_modules_fired"] == len(tracer.blocks)


def test_layers_below_a_detach_are_named(model: nn.Module) -> None:
    batch = random_responses(groups=1)
    model.model.layers[0].register_forward_hook(lambda m, a, y: y.detach())
    with pytest.warns(UserWarning, match=r"7 of 15 .* first is model\.layers\.0"):
        engine_scores(model, batch, exact_config())


def test_frozen_layers_are_named(model: nn.Module) -> None:
    model.requires_grad_(False)
    with pytest.raises(AttributionError, match=r"frozen .* model\.layers\.0\.self_attn\.q_proj"):
        InfluenceTracer(model, config=exact_config())


def test_a_filter_that_matches_nothing_shows_what_there_is(model: nn.Module) -> None:
    with pytest.raises(AttributionError, match=r"c_attn.*none of the 15.*q_proj"):
        InfluenceTracer(model, config=InfluenceConfig.older(module_name_filter=("c_attn",)))


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(AttributionError, match=r"no nn\.Linear"):
        InfluenceTracer(nn.Embedding(3, 3), config=InfluenceConfig.older())


def test_missing_labels_terms_and_advantages_are_named(model: nn.Module) -> None:
    batch = random_responses()
    with (
        InfluenceTracer(model, config=exact_config()) as tracer,
        pytest.raises(AttributionError, match="accepted and group"),
    ):
        tracer.score()
    with InfluenceTracer(model, config=exact_config(credit="both")) as tracer:
        capture(tracer, model, batch, list(range(6)))
        with pytest.raises(AttributionError, match="terms"):
            tracer.score(accepted=batch.accepted, group=batch.group)
    with InfluenceTracer(model, config=exact_config(contrastive_agg="advantage")) as tracer:
        capture(tracer, model, batch, list(range(6)))
        with pytest.raises(AttributionError, match="needs advantages"):
            tracer.score(accepted=batch.accepted, group=batch.group)


def test_terms_of_the_wrong_length_are_refused(model: nn.Module) -> None:
    batch = random_responses()
    with InfluenceTracer(model, config=exact_config(credit="loss_term")) as tracer:
        capture(tracer, model, batch, list(range(6)))
        with pytest.raises(AttributionError, match="one term for each"):
            tracer.score(
                accepted=batch.accepted,
                group=batch.group,
                terms=lambda responses: model.lm_head.weight.sum()[None],
            )


@pytest.mark.parametrize(
    "knobs, message",
    [
        ({"hessian_mode": "invers"}, "'optimizer', 'identity', 'inverse'"),
        ({"credit": "token"}, "'loss_term'"),
        ({"projection_dim_factor": -1}, "negative"),
        ({"solver": "gram"}, "hessian_source='response'"),
        ({"solver": "response", "hessian_source": "token"}, "hessian_source='token'"),
        ({"solver": "cg", "hessian_mode": "identity"}, "nothing to solve"),
        ({"reg_scale": 0.0}, "reg_scale"),
        ({"preconditioner_form": "exact", "projection_dim_factor": 2}, "projected gradients"),
    ],
)
def test_a_knob_that_cannot_be_right_is_refused(knobs: dict[str, object], message: str) -> None:
    with pytest.raises(AttributionError, match=message):
        InfluenceConfig.older(**knobs)


def test_a_failed_backward_leaves_no_half_capture(model: nn.Module) -> None:
    batch = random_responses(groups=1)
    with InfluenceTracer(model, config=exact_config()) as tracer:
        tokens = batch.padded([0, 1, 2])[2]
        with pytest.raises(ValueError), tracer.capture(response=torch.arange(3), tokens=tokens):
            padded_objective(model, batch, [0, 1, 2]).backward()
            raise ValueError("out of memory, say")
        capture(tracer, model, batch, [0, 1, 2])
        assert tracer.score(accepted=batch.accepted, group=batch.group).token_scores[0].numel() > 0


def test_the_memory_estimate_follows_the_sizes() -> None:
    model = tiny_model()
    with InfluenceTracer(model, config=exact_config(pairwise=False)) as tracer:
        small, large = tracer.memory_estimate(4, 100), tracer.memory_estimate(4, 200)
        per_token = 4 * sum(block.k_out + block.k_in for block in tracer.blocks)
        assert large.stored_factors - small.stored_factors == 100 * per_token
        assert tracer.memory_estimate(4, 100, whole_groups=True).stored_factors == 0
        assert small.projections == 0
    with InfluenceTracer(model, config=exact_config(projection_dim_factor=4)) as tracer:
        assert tracer.memory_estimate(4, 100).stored_factors < small.stored_factors
        assert tracer.memory_estimate(4, 100).projections > 0


def test_deferred_errors_leave_the_backward_pass_alone(model: nn.Module) -> None:
    batch = random_responses(groups=1)
    with InfluenceTracer(model, config=exact_config(), defer_errors=True) as tracer:
        loss = padded_objective(model, batch, [0, 1, 2])
        with tracer.capture(response=torch.arange(2), tokens=masks(2, 30)):
            loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        with pytest.raises(AttributionError, match=r"capture failed: .* going backward"):
            tracer.score(accepted=batch.accepted, group=batch.group)


def test_a_misspelt_argument_is_not_passed_over(model: nn.Module) -> None:
    with InfluenceTracer(model, config=exact_config()) as tracer:
        with pytest.raises(TypeError, match="'acepted' is no argument"):
            tracer.score(acepted=torch.ones(2, dtype=torch.bool))
        with (
            pytest.raises(TypeError, match="'advantage' is no argument"),
            tracer.capture(response=torch.arange(2), tokens=masks(), advantage=torch.ones(2)),
        ):
            pass


# ---------------------------------------------------------------- the two kinds of scores


@pytest.mark.parametrize(
    ("knobs", "is_parts"),
    [
        ({}, True),
        ({"target": "output_function"}, True),
        ({"accepted_rejected_scope": "per_prompt", "measure": 3, "pairwise": False}, True),
        ({"target": "log_prob"}, False),
        ({"hessian_mode": "identity"}, False),
        ({"credit": "position"}, False),
        ({"credit": "both"}, False),
        ({"output_function": "log_prob"}, False),
    ],
)
def test_the_default_score_is_of_parts_and_every_other_definition_of_factors(
    knobs: dict[str, object], is_parts: bool
) -> None:
    config = InfluenceConfig(**knobs)
    assert config.is_parts == is_parts
    assert config.about == knobs.get("target", "output_function" if is_parts else "log_prob")
    assert config.scope == knobs.get("accepted_rejected_scope", "all_selected" if is_parts else "per_prompt")


OF_FACTORS = {
    "contrastive_agg": "sum",
    "exclude_self_response": True,
    "response_reduction": "sum",
    "hessian_source": "token",
    "reg_lambda": 1.0,
    "reg_rule": "per_dimension",
    "reg_scale": 2.0,
    "solver": "cg",
    "preconditioner_form": "factored",
    "module_name_filter": ("mlp",),
    "max_modules": 2,
    "projection_dim_factor": 32,
    "max_proj_vector_sum": 10,
    "max_hessian_dim": 10,
    "max_tokens_per_response": 5,
    "grad_offload_to_cpu": True,
    "force_gpu_compute": True,
    "seed": 1,
    "profile_timing": True,
}


@pytest.mark.parametrize("knob", OF_FACTORS)
def test_a_knob_of_factors_beside_parts_is_an_error_that_names_the_modes_which_read_it(knob: str) -> None:
    assert set(OF_FACTORS) == set(FACTOR_KNOBS)
    said = rf"{knob}=.* belongs to scores from captured factors: set hessian_mode=identity\|inverse or credit=position"
    with pytest.raises(AttributionError, match=said):
        InfluenceConfig(**{knob: OF_FACTORS[knob]})


@pytest.mark.parametrize("measure", ["all", 0, 2])
def test_measured_groups_beside_factors_are_an_error(measure: object) -> None:
    assert InfluenceConfig(measure=measure).measure == measure
    with pytest.raises(AttributionError, match="belongs to the default score"):
        InfluenceConfig(measure=measure, credit="position")


@pytest.mark.parametrize("measure", ["some", -1, True, 1.5, None])
def test_a_measure_that_is_no_number_of_groups_is_refused(measure: object) -> None:
    with pytest.raises(AttributionError, match="'auto', 'all' or a number of groups"):
        InfluenceConfig(measure=measure)


def test_the_originals_definition_has_a_name() -> None:
    older = InfluenceConfig.older()
    assert not older.is_parts and older.scope == "per_prompt" and older.about == "output_function"
    assert (older.hessian_mode, older.reg_rule, older.credit) == ("inverse", "per_dimension", "position")
    assert older.projection_dim_factor == 32 and InfluenceConfig.older(projection_dim_factor=None).scope == older.scope
