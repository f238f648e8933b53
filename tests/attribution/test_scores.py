"""Scores against brute force in float64, and the identities 2 to 6 of the design."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradtrace.attribution import InfluenceTracer
from gradtrace.attribution.factors.capture import Capture
from tests.attribution.models import (
    FAMILIES,
    Responses,
    padded_objective,
    random_responses,
    tiny_model,
    with_holes,
)
from tests.attribution.reference import token_terms
from tests.attribution.scoring import assert_close, brute_force, capture, engine_scores, exact_config

GRID = [
    {
        "hessian_mode": mode,
        "hessian_source": source,
        "contrastive_agg": agg,
        "accepted_rejected_scope": scope,
        "exclude_self_response": leave_out,
        "response_reduction": reduction,
    }
    for mode, source, agg, scope, leave_out, reduction in itertools.product(
        ("inverse", "identity"),
        ("response", "token"),
        ("sum", "mean", "advantage"),
        ("per_prompt", "all_selected"),
        (False, True),
        ("mean", "sum"),
    )
]


def label(knobs: dict[str, object]) -> str:
    return "-".join(str(value) for value in knobs.values())


@pytest.mark.parametrize("knobs", GRID, ids=label)
def test_every_combination_of_knobs_equals_brute_force(knobs: dict[str, object]) -> None:
    model, batch = tiny_model("gpt2"), random_responses(groups=2, n=3, seed=1)
    config = exact_config(module_name_filter=("h.1.attn", "h.1.mlp.c_fc"), credit="both", **knobs)
    trace = engine_scores(model, batch, config, splits=[[0, 1, 3], [2, 5, 4]])
    scores, pairwise, kernel = brute_force(model, batch, config)
    assert_close(trace.position_scores, scores)
    assert_close([p.nan_to_num() for p in trace.pairwise], pairwise)
    assert_close([trace.response_kernel.nan_to_num()], [kernel])
    assert_close(trace.loss_term_scores, brute_force(model, batch, config, credit="loss_term")[0])


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_brute_force_in_both_credits(family: str, tied: bool) -> None:
    model, batch = tiny_model(family, tied), random_responses()
    config = exact_config(credit="both")
    trace = engine_scores(model, batch, config)
    assert_close(trace.position_scores, brute_force(model, batch, config)[0])
    assert_close(trace.loss_term_scores, brute_force(model, batch, config, credit="loss_term")[0])


HOLED = [knobs for knobs in GRID if not knobs["exclude_self_response"] and knobs["contrastive_agg"] == "mean"]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("knobs", HOLED, ids=label)
def test_tokens_of_others_inside_of_responses_carry_no_gradient_and_no_score(
    knobs: dict[str, object], packed: bool
) -> None:
    """Tool results and templates: means, Hessians and scores are of the policy's tokens, and of no other."""
    model, batch = tiny_model(), with_holes(random_responses(groups=2, n=3, seed=1, longest=8))
    assert any(len(mask) - 1 > int(mask.nonzero().max()) for mask in batch.masks or [])  # a hole at the end
    config = exact_config(module_name_filter=("layers.1",), credit="both", **knobs)
    trace = engine_scores(model, batch, config, splits=[[0, 1, 3], [2, 5, 4]], packed=packed)
    scores, pairwise, _ = brute_force(model, batch, config)
    assert [len(own) for own in trace.position_scores] == [int(mask.sum()) for mask in batch.masks or []]
    assert_close(trace.position_scores, scores)
    assert_close([p.nan_to_num() for p in trace.pairwise], pairwise)
    assert_close(trace.loss_term_scores, brute_force(model, batch, config, credit="loss_term")[0])


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    groups=st.integers(1, 3),
    n=st.integers(2, 4),
    source=st.sampled_from(["response", "token"]),
    family=st.sampled_from(FAMILIES),
    data=st.data(),
)
def test_micro_batch_split_does_not_change_scores(
    seed: int, groups: int, n: int, source: str, family: str, data: st.DataObject
) -> None:
    """Identity 4: any split, any order, streamed or stored, padded or packed."""
    model, batch = tiny_model(family), random_responses(groups, n, seed)
    config = exact_config(hessian_source=source)
    order = data.draw(st.permutations(range(len(batch))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(batch) - 1), max_size=3)))
    splits = [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(batch)], strict=True)]
    streamed = data.draw(st.booleans())
    packed = data.draw(st.booleans())
    trace = engine_scores(model, batch, config, splits, labels_at_capture=streamed, packed=packed)
    assert_close(trace.token_scores, engine_scores(model, batch, config).token_scores)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    mode=st.sampled_from(["inverse", "identity"]),
    source=st.sampled_from(["response", "token"]),
    reduction=st.sampled_from(["mean", "sum"]),
    leave_out=st.booleans(),
)
def test_token_sum_equals_response(seed: int, mode: str, source: str, reduction: str, leave_out: bool) -> None:
    """Identity 2: Σ position scores, prompt included = Σ loss-term scores = response-level influence."""
    model, batch = tiny_model("qwen2", tied=True), random_responses(seed=seed)
    config = exact_config(
        credit="both",
        hessian_mode=mode,
        hessian_source=source,
        response_reduction=reduction,
        contrastive_agg="sum",
        exclude_self_response=leave_out,
    )
    trace = engine_scores(model, batch, config)
    sign = batch.accepted.double() * 2 - 1
    for r, length in enumerate(batch.lengths()):
        weights = sign * (batch.group == batch.group[r])
        if leave_out:
            weights[r] = 0.0
        response_level = (trace.response_kernel[r].nan_to_num() * weights).sum()
        if reduction == "mean":  # the kernel is per token of the response, its tokens' sum is not
            response_level = response_level * length
        by_position = trace.position_scores[r].sum() + trace.rest_scores[r]
        by_term = trace.loss_term_scores[r].sum()
        assert torch.allclose(by_position, response_level, rtol=1e-8, atol=1e-9)
        assert torch.allclose(by_term, response_level, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("knobs", [{}, {"response_reduction": "sum", "exclude_self_response": True}])
def test_products_of_positions_give_what_gradients_give(
    monkeypatch: pytest.MonkeyPatch, knobs: dict[str, object], packed: bool
) -> None:
    model, batch = tiny_model(), random_responses()
    found = []
    for chosen in (True, False):
        monkeypatch.setattr(Capture, "prefers_products", lambda self, *_, chosen=chosen: chosen)
        config = exact_config(hessian_mode="identity", **knobs)
        found.append(engine_scores(model, batch, config, labels_at_capture=True, packed=packed))
    products, gradients = found
    assert_close(products.position_scores, gradients.position_scores)
    for response in range(len(batch)):
        assert torch.allclose(
            products.pairwise_of(response)[1], gradients.pairwise_of(response)[1], rtol=1e-9, atol=1e-12
        )
    assert products.metrics.keys() == gradients.metrics.keys()


def test_large_lambda_gives_the_identity_score() -> None:
    """Identity 3, second half: λ·score → identity score."""
    model, batch = tiny_model(), random_responses()
    plain = engine_scores(model, batch, exact_config(hessian_mode="identity"))
    for source in ("response", "token"):
        damped = engine_scores(model, batch, exact_config(hessian_source=source, reg_lambda=1e9))
        assert_close([s * 1e9 for s in damped.token_scores], plain.token_scores, tolerance=1e-6)


def test_tracing_changes_no_bit_of_the_gradients() -> None:
    """Identity 5."""
    batch = random_responses()

    def gradients(traced: bool) -> list[torch.Tensor]:
        model = tiny_model().float()
        for module in model.modules():
            module.float()
        batch_loss = padded_objective(model, batch, list(range(6)))
        if not traced:
            batch_loss.backward()
            return [p.grad for p in model.parameters()]
        with InfluenceTracer(model, config=exact_config()) as tracer:
            capture(tracer, model, batch, list(range(6)))
        return [p.grad for p in model.parameters()]

    for plain, traced in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(plain, traced)


def test_an_sgd_step_on_one_token_changes_each_response_as_predicted() -> None:
    """Identity 6: F_r(θ + η∇term_t) − F_r(θ) = η·infl(t→r) + O(η²) (identity, loss-term, sum, all linear layers)."""
    model, batch = tiny_model("gpt2", tied=True), random_responses(groups=1, n=3, seed=3)
    eta = 1e-6
    # loss-term influence on a single response r: contrast that picks only r
    for target in range(3):
        chosen = torch.zeros(3, dtype=torch.float64)
        chosen[target] = 1.0
        config = exact_config(
            hessian_mode="identity", credit="loss_term", contrastive_agg="advantage", response_reduction="sum"
        )
        batch.advantages = chosen
        trace = engine_scores(model, batch, config)
        with InfluenceTracer(model, config=config) as tracer:
            names = [block.parameter_name for block in tracer.blocks]
        parameters = [dict(model.named_parameters())[name] for name in names]
        for source in range(3):
            for token in range(batch.lengths()[source]):
                gradient = torch.autograd.grad(token_terms(model, batch, source)[token], parameters, allow_unused=True)
                values = []
                for sign in (1.0, -1.0):
                    with torch.no_grad():
                        for p, g in zip(parameters, gradient, strict=True):
                            if g is not None:
                                p.add_(sign * eta * g)
                        values.append(token_terms(model, batch, target).sum())
                        for p, g in zip(parameters, gradient, strict=True):
                            if g is not None:
                                p.sub_(sign * eta * g)
                measured = (values[0] - values[1]) / (2 * eta)
                predicted = trace.token_scores[source][token]
                assert torch.allclose(measured, predicted, rtol=1e-5, atol=1e-6)


def test_scale_undoes_a_normaliser_of_the_loss() -> None:
    model, batch = tiny_model(), random_responses()
    config = exact_config(hessian_mode="identity")
    expected = engine_scores(model, batch, config)
    with InfluenceTracer(model, config=config) as tracer:
        _, _, tokens, _ = batch.padded(list(range(6)))
        loss = -padded_objective(model, batch, list(range(6))) / 17.0
        with tracer.capture(response=torch.arange(6), tokens=tokens, scale=17.0):
            loss.backward()
        trace = tracer.score(accepted=batch.accepted, group=batch.group)
    assert_close(trace.token_scores, expected.token_scores)


def test_max_tokens_leaves_the_first_scores_as_they_were() -> None:
    model, batch = tiny_model(), random_responses(longest=6, seed=5)
    whole = engine_scores(model, batch, exact_config())
    for streamed in (False, True):
        cut = engine_scores(model, batch, exact_config(max_tokens_per_response=2), labels_at_capture=streamed)
        assert_close([s[:2] for s in cut.token_scores], [s[:2] for s in whole.token_scores])
        for r, length in enumerate(batch.lengths()):
            assert len(cut.token_scores[r]) == length
            assert cut.captured(r).tolist() == [t < 2 for t in range(length)]
            rest = whole.rest_scores[r] + whole.token_scores[r][2:].sum()
            assert torch.allclose(cut.rest_scores[r], rest)


def test_offloaded_factors_and_missing_pairwise_change_no_score() -> None:
    model, batch = tiny_model(), random_responses()
    whole = engine_scores(model, batch, exact_config())
    lean = engine_scores(model, batch, exact_config(grad_offload_to_cpu=True, force_gpu_compute=True, pairwise=False))
    assert_close(lean.token_scores, whole.token_scores)
    assert lean.pairwise_of(0)[0] == [] and whole.pairwise_of(0)[0] == [0, 1, 2]


def test_projected_scores_agree_between_streamed_and_stored() -> None:
    model, batch = tiny_model(), random_responses()
    config = exact_config(projection_dim_factor=2, credit="both")
    stored = engine_scores(model, batch, config)
    streamed = engine_scores(model, batch, config, labels_at_capture=True)
    assert_close(streamed.token_scores, stored.token_scores)
    for trace in (stored, streamed):
        totals = [trace.position_scores[r].sum() + trace.rest_scores[r] for r in range(6)]
        assert_close(totals, [s.sum() for s in trace.loss_term_scores])


def test_counters_say_what_was_traced() -> None:
    model, batch = tiny_model(), random_responses(groups=3)
    batch.accepted[:3] = True  # a constant group
    trace = engine_scores(model, batch, exact_config(hessian_source="token"))
    metrics = trace.metrics
    assert metrics["influence_trace/uid_total"] == 3
    assert metrics["influence_trace/uid_constant"] == 1
    assert metrics["influence_trace/uid_mixed"] == 2
    assert metrics["influence_trace/selected_responses"] == 6
    assert metrics["influence_trace/selected_prompts"] == 2
    assert metrics["influence_trace/rows_emitted"] == len(batch.lengths()[3:])
    assert metrics["influence_trace/tokens_emitted"] == sum(batch.lengths()[3:])
    assert metrics["influence_trace/debug_solver_gram"] + metrics.get("influence_trace/debug_solver_dense", 0) == 30
    assert trace.skipped == {0: "constant_reward"}
    assert trace.token_scores[0].numel() == 0
    assert metrics["timing_s/influence_capture"] > 0


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("source", ["response", "token"])
def test_a_signed_objective_is_contrasted_by_log_prob(source: str, streamed: bool) -> None:
    """With `sign` the target of response r is turned, token gradients are not; totals still add up."""
    model, batch = tiny_model("gpt2"), random_responses()
    sign = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    config = exact_config(hessian_source=source, credit="both", contrastive_agg="sum")
    trace = engine_scores(model, batch, config, labels_at_capture=streamed, sign=sign)
    scores, pairwise, kernel = brute_force(model, batch, config, sign=sign)
    assert_close(trace.position_scores, scores)
    assert_close([p.nan_to_num() for p in trace.pairwise], pairwise)
    assert_close([trace.response_kernel.nan_to_num()], [kernel])
    totals = [trace.position_scores[r].sum() + trace.rest_scores[r] for r in range(6)]
    assert_close(totals, [terms.sum() for terms in trace.loss_term_scores])


def test_the_sign_is_counted_once_not_twice() -> None:
    """A policy-gradient objective of one-token responses, where the truth is plain: raising the token of a rejected
    response must not help the accepted one, so its training step (which lowers it) must."""
    model = tiny_model()
    batch = random_responses(groups=1, n=2, seed=4)
    batch.sequences = [torch.tensor([1, 2, 3, 5]), torch.tensor([1, 2, 3, 7])]
    batch.prompt_lengths = [3, 3]
    batch.accepted = torch.tensor([True, False])
    batch.weights = [torch.tensor([1.0], dtype=torch.float64), torch.tensor([-1.0], dtype=torch.float64)]
    config = exact_config(hessian_mode="identity", contrastive_agg="sum")
    sign = torch.tensor([1.0, -1.0], dtype=torch.float64)
    once = engine_scores(model, batch, config, sign=sign)
    assert once.token_scores[0] > 0 and once.token_scores[1] > 0
    raising = engine_scores(model, batch_with_unit_weights(batch), config)
    assert raising.token_scores[0] > 0 > raising.token_scores[1]


def batch_with_unit_weights(batch: Responses) -> Responses:
    batch.weights = [torch.ones_like(weights) for weights in batch.weights]
    return batch


@pytest.mark.parametrize("streamed", [False, True])
def test_profiling_says_where_the_time_goes(streamed: bool) -> None:
    model, batch = tiny_model(), random_responses()
    profiled = engine_scores(model, batch, exact_config(profile_timing=True), labels_at_capture=streamed)
    plain = engine_scores(model, batch, exact_config(), labels_at_capture=streamed)
    assert profiled.metrics["timing_s/influence_project"] > 0 and profiled.metrics["timing_s/influence_solve"] > 0
    assert "timing_s/influence_solve" not in plain.metrics
    assert_close(profiled.token_scores, plain.token_scores)
