"""Scores in the geometry of a real optimizer, of step and target apart, against one autograd call per token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradtrace.attribution import AttributionError, InfluenceConfig, InfluenceTrace, InfluenceTracer
from gradtrace.attribution.factors.result import Totals
from tests.attribution.models import (
    FAMILIES,
    Responses,
    padded_objective,
    random_responses,
    tiny_model,
    token_log_probs,
)
from tests.attribution.reference import loss_term_gradients, position_gradients, token_terms
from tests.attribution.scoring import assert_close, engine_scores, exact_config

RIDING, APART = "riding", "apart"


def adam(model: nn.Module, **knobs: Any) -> torch.optim.Optimizer:
    """After two real steps, with two groups of parameters that have numbers of their own."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "betas": (0.9, 0.7), "eps": 1e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.9), **knobs)
    for seed in (7, 8):
        optimizer.zero_grad()
        padded_objective(model, random_responses(seed=seed), list(range(6))).backward()
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


def responses_of(how: str, groups: int = 2, n: int = 3, seed: int = 0) -> Responses:
    """`riding`: the step weighs all tokens of a response alike, so that one pass is step and target."""
    batch = random_responses(groups, n, seed)
    if how == RIDING:
        batch.weights = [torch.full_like(w, float(a)) for w, a in zip(batch.weights, batch.advantages, strict=True)]
    return batch


def unweighted(batch: Responses) -> Responses:
    return Responses(
        batch.sequences,
        batch.prompt_lengths,
        [torch.ones_like(weights) for weights in batch.weights],
        batch.group,
        batch.accepted,
        batch.advantages,
    )


def objective(model: nn.Module, batch: Responses, rows: list[int], packed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(Σ w ℓ, response, tokens)."""
    if not packed:
        return padded_objective(model, batch, rows), torch.tensor(rows), batch.padded(rows)[2]
    ids, positions, response, tokens, weights = batch.packed(rows)
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    return (token_log_probs(logits, ids) * weights).sum(), response, tokens


def traced(
    model: nn.Module,
    batch: Responses,
    config: InfluenceConfig,
    how: str,
    optimizer: Any = None,
    splits: list[list[int]] | None = None,
    labels_at_capture: bool = True,
    packed: bool = False,
    coming: Any = None,
    method: Any = None,
    passes: list[int] | None = None,
) -> InfluenceTrace:
    """The captured pass is that of a loss of a tenth of the objective: `scale` turns it back. `passes` is told of every
    pass over own terms."""
    splits = splits or [list(range(len(batch)))]
    labels = {"accepted": batch.accepted, "group": batch.group} if labels_at_capture else {}
    with InfluenceTracer(model, config=config, optimizer=optimizer) as tracer:
        for rows in splits:
            step, response, tokens = objective(model, batch, rows, packed)
            common: dict[str, Any] = {"response": response, "tokens": tokens, **labels}
            if how == APART:
                target = objective(model, unweighted(batch), rows, packed)[0]
                with tracer.capture(**common, role="target"):
                    torch.autograd.grad(target, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
            with tracer.capture(
                **common,
                scale=-10.0,
                role="step" if how == APART else "both",
                target_scale=-10.0 / batch.advantages if how == RIDING else None,
            ):
                (step / -10).backward()

        def terms(responses: list[int]) -> Tensor:
            if passes is not None:
                passes.append(len(responses))
            return torch.cat([token_terms(model, batch, r) for r in responses])

        labels = {"accepted": batch.accepted, "group": batch.group}
        return tracer.score(**labels, coming=coming, terms=terms, method=method)


def scores_by_hand(
    model: nn.Module,
    batch: Responses,
    names: list[str],
    precondition: Callable[[str, Tensor], Tensor],
    credit: str = "loss_term",
) -> list[Tensor]:
    """s_t = w_t ∇ℓ_t · P Σ_r c_r mean_s ∇ℓ_rs, with the contrast of means, from explicit gradients; by position with
    what flows through the position that predicts t, instead of w_t ∇ℓ_t."""
    steps = loss_term_gradients(model, batch, names) if credit == "loss_term" else at_tokens(model, batch, names)
    plain = loss_term_gradients(model, unweighted(batch), names)
    scores = []
    for r in range(len(batch)):
        group = (batch.group == batch.group[r]).nonzero().squeeze(-1).tolist()
        good = [s for s in group if batch.accepted[s]]
        bad = [s for s in group if not batch.accepted[s]]
        total = 0.0
        for name in names:
            mean = {s: plain[s][name].mean(0) for s in group}
            contrast = sum(mean[s] for s in good) / len(good) - sum(mean[s] for s in bad) / len(bad)
            total = total + (steps[r][name] * precondition(name, contrast)).flatten(1).sum(1)
        scores.append(total)
    return scores


def at_tokens(model: nn.Module, batch: Responses, names: list[str]) -> list[dict[str, Tensor]]:
    """Per response {parameter: [T_r, ...]}: u vᵀ where its tokens are predicted, shaped like the parameter."""
    modules = {name: model.get_submodule(name.removesuffix(".weight")) for name in names}
    found = position_gradients(model, batch, modules, {name: name for name in names})
    turned = [name for name, module in modules.items() if not isinstance(module, nn.Linear)]
    chosen = [{name: g[batch.places(r) - 1] for name, g in own.items()} for r, own in enumerate(found)]
    return [{name: g.mT if name in turned else g for name, g in own.items()} for own in chosen]


def exact_form(model: nn.Module, optimizer: Any, coming: bool = False) -> Callable[[str, Tensor], Tensor]:
    parameters = dict(model.named_parameters())
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}

    def precondition(name: str, gradient: Tensor) -> Tensor:
        p = parameters[name]
        state, (_, beta), eps = optimizer.state[p], groups[id(p)]["betas"], groups[id(p)]["eps"]
        moment, step = state["exp_avg_sq"], float(state["step"])
        if coming:
            moment, step = beta * moment + (1 - beta) * p.grad**2, step + 1
        return gradient / ((moment / (1 - beta**step)).sqrt() + eps)

    return precondition


def factored_form(model: nn.Module, optimizer: Any) -> Callable[[str, Tensor], Tensor]:
    exact = exact_form(model, optimizer)

    def precondition(name: str, gradient: Tensor) -> Tensor:
        squares = exact(name, torch.ones_like(gradient)) ** -2
        outer = squares.mean(1, keepdim=True) * squares.mean(0, keepdim=True) / squares.mean()
        return gradient / outer.sqrt()

    return precondition


def config_of(**knobs: Any) -> InfluenceConfig:
    return InfluenceConfig(**{"target": "log_prob", **knobs})


def names_of(model: nn.Module, config: InfluenceConfig) -> list[str]:
    with InfluenceTracer(model, config=config) as tracer:
        return [block.parameter_name for block in tracer.blocks]


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"preconditioner_form": "factored"},
        {"projection_dim_factor": 2},
        {"response_reduction": "sum"},
        {"exclude_self_response": True},
        {"hessian_mode": "identity"},
    ],
)
def test_two_passes_along_each_direction_give_the_derivative(knobs: dict[str, Any]) -> None:
    model, batch = tiny_model(), responses_of(RIDING)
    optimizer = adam(model)
    exact = traced(model, batch, config_of(**knobs), RIDING, optimizer)
    passes: list[int] = []
    ours = traced(model, batch, config_of(**knobs), RIDING, optimizer, method="finite_difference", passes=passes)
    directions = len(batch) if "exclude_self_response" in knobs else 2
    assert len(passes) == 2 * directions
    for a, b in zip(ours.loss_term_scores, exact.loss_term_scores, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-7


@pytest.mark.parametrize("how", [RIDING, APART])
@pytest.mark.parametrize("form", ["exact", "factored"])
@pytest.mark.parametrize("family", FAMILIES)
def test_both_credits_equal_brute_force(family: str, form: str, how: str) -> None:
    model, batch = tiny_model(family), responses_of(how)
    optimizer = adam(model)
    config = config_of(preconditioner_form=form)
    trace = traced(model, batch, config, how, optimizer)
    precondition = (exact_form if form == "exact" else factored_form)(model, optimizer)
    names = names_of(model, config)
    assert_close(trace.loss_term_scores, scores_by_hand(model, batch, names, precondition))
    assert_close(trace.position_scores, scores_by_hand(model, batch, names, precondition, "position"))
    assert trace.token_scores == trace.loss_term_scores
    assert trace.meta["optimizer"] == "AdamW" and trace.meta["second_moment_loss_term"] == "state_before"
    assert trace.meta["preconditioner_form"] == form


@pytest.mark.parametrize("how", [RIDING, APART])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("labels_at_capture", [False, True], ids=["stored", "streamed"])
@pytest.mark.parametrize("form", ["exact", "factored"])
def test_no_split_into_micro_batches_changes_a_score(
    form: str, labels_at_capture: bool, packed: bool, how: str
) -> None:
    model, batch = tiny_model(), responses_of(how, groups=3)
    optimizer = adam(model)
    config = config_of(preconditioner_form=form, credit="both")
    whole = traced(model, batch, config, how, optimizer)
    splits = [[0, 1, 2], [3, 8, 5, 6], [7, 4]]
    parts = traced(model, batch, config, how, optimizer, splits, labels_at_capture, packed)
    assert_close(parts.loss_term_scores, whole.loss_term_scores)
    assert_close(parts.position_scores, whole.position_scores)


def test_the_coming_gradient_is_part_of_the_second_moment() -> None:
    model, batch = tiny_model(), responses_of(RIDING)
    optimizer, config = adam(model), config_of()
    trace = traced(model, batch, config, RIDING, optimizer, coming=True)
    assert trace.meta["second_moment_loss_term"] == "state_with_batch"
    assert trace.meta["second_moment_backward"] == "state_before"
    coming = {name: p.grad.clone() for name, p in model.named_parameters()}
    expected = scores_by_hand(model, batch, names_of(model, config), exact_form(model, optimizer, coming=True))
    assert_close(trace.loss_term_scores, expected)
    given = traced(model, batch, config, RIDING, optimizer, coming=coming)
    assert_close(given.loss_term_scores, expected)


def test_before_the_first_step_the_batch_is_all_there_is() -> None:
    model, batch = tiny_model(), responses_of(RIDING)
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-6)
    config = config_of()
    trace = traced(model, batch, config, RIDING, optimizer, coming=True)
    assert trace.meta["second_moment_loss_term"] == "batch_gradient"
    assert trace.meta["second_moment_backward"] == "none"
    gradients = {name: p.grad for name, p in model.named_parameters()}
    expected = scores_by_hand(model, batch, names_of(model, config), lambda name, g: g / (gradients[name].abs() + 1e-6))
    assert_close(trace.loss_term_scores, expected)


@pytest.mark.parametrize("make", [None, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)], ids=["none", "sgd"])
def test_without_adam_the_geometry_is_flat(make: Any) -> None:
    model, batch = tiny_model(), responses_of(RIDING)
    optimizer = None if make is None else make(model.parameters())
    trace = traced(model, batch, config_of(), RIDING, optimizer)
    flat = traced(model, batch, config_of(hessian_mode="identity"), RIDING)
    assert_close(trace.loss_term_scores, flat.loss_term_scores)
    assert_close(trace.position_scores, flat.position_scores)
    assert trace.meta["geometry"] == ("identity" if make is None else "optimizer")
    names = names_of(model, config_of())
    assert_close(trace.loss_term_scores, scores_by_hand(model, batch, names, lambda name, g: g))


def test_projected_scores_are_the_products_of_projected_gradients() -> None:
    model, batch = tiny_model(), responses_of(RIDING)
    optimizer = adam(model)
    config = config_of(projection_dim_factor=2)
    trace = traced(model, batch, config, RIDING, optimizer)
    assert trace.meta["preconditioner_form"] == "factored"
    root = factored_form(model, optimizer)
    with InfluenceTracer(model, config=config) as tracer:
        blocks = {block.parameter_name: block for block in tracer.blocks}

    def there_and_back(name: str, gradient: Tensor) -> Tensor:
        half = root(name, torch.ones_like(gradient)).sqrt()
        p_out, p_in = blocks[name].projections(torch.float64, torch.device("cpu"))
        return half * (p_out.T @ (p_out @ (half * gradient) @ p_in.T) @ p_in)

    assert_close(trace.loss_term_scores, scores_by_hand(model, batch, list(blocks), there_and_back))
    assert_close(trace.position_scores, scores_by_hand(model, batch, list(blocks), there_and_back, "position"))


def test_lora_adapters_in_the_geometry_of_their_optimizer() -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    lora = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(tiny_model(), lora).double()
    batch, optimizer, config = responses_of(RIDING), adam(model), config_of()
    trace = traced(model, batch, config, RIDING, optimizer)
    names = names_of(model, config)
    assert len(names) == 12  # queries, values and down projection of both blocks, A and B each
    precondition = exact_form(model, optimizer)
    assert_close(trace.loss_term_scores, scores_by_hand(model, batch, names, precondition))
    assert_close(trace.position_scores, scores_by_hand(model, batch, names, precondition, "position"))


def test_a_step_on_one_token_changes_the_contrast_by_its_score() -> None:
    """Identity 6 with a real optimizer: Adam without momentum, one token's term, and v̂ as that very step sees it."""
    model, batch = tiny_model(), responses_of(APART, groups=1, n=4)
    for p in model.parameters():
        p.requires_grad_(p.dim() == 2)
    model.get_input_embeddings().weight.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    config = config_of(module_name_filter=".*")

    def contrast() -> float:
        with torch.no_grad():
            means = torch.stack([token_terms(model, unweighted(batch), r).mean() for r in range(4)])
        return float(means[batch.accepted].mean() - means[~batch.accepted].mean())

    optimizer = torch.optim.Adam(trained, lr=1e-7, betas=(0.0, 0.9))
    for p in trained:
        p.grad = torch.randn_like(p)
    optimizer.step()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradient = torch.autograd.grad(token_terms(model, batch, 2)[0], trained)
    names = {id(p): name for name, p in model.named_parameters()}
    coming = {names[id(p)]: g for p, g in zip(trained, gradient, strict=True)}
    trace = traced(model, batch, config, APART, optimizer, coming=coming)
    start = contrast()
    for p, g in zip(trained, gradient, strict=True):
        p.grad = -g
    optimizer.step()
    measured = (contrast() - start) / 1e-7
    assert measured == pytest.approx(float(trace.loss_term_scores[2][0]), rel=1e-4)
    assert any(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_tokens_without_a_step_are_marked() -> None:
    model, batch = tiny_model(), responses_of(APART)
    batch.weights[1][:] = 0.0  # as clipping does
    batch.weights[0] = torch.ones_like(batch.weights[0])
    for credit in ("loss_term", "position"):
        trace = traced(model, batch, config_of(credit=credit), APART)
        assert bool(trace.without_step(1).all()) and not bool(trace.without_step(0).any())


def test_tracing_changes_no_bit_of_training() -> None:
    def trained(on: bool) -> list[Tensor]:
        model, batch = tiny_model(), responses_of(RIDING)
        optimizer = adam(model)
        if on:
            traced(model, batch, config_of(), RIDING, optimizer, coming=True)
        else:
            (padded_objective(model, batch, list(range(6))) / -10).backward()
        optimizer.step()
        return [p.detach() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(trained(True), trained(False), strict=True))


@pytest.mark.parametrize(
    "knobs, arguments, message",
    [
        ({}, {}, "give target_scale"),
        ({}, {"sign": torch.ones(6), "target_scale": torch.ones(6)}, "sign turns"),
        ({"target": "output_function", "credit": "position"}, {"role": "target"}, "one pass and one scale"),
    ],
)
def test_a_target_that_is_not_clear_is_refused(knobs: dict, arguments: dict, message: str) -> None:
    model, batch = tiny_model(), responses_of(RIDING)
    with (
        InfluenceTracer(model, config=config_of(**knobs)) as tracer,
        pytest.raises(AttributionError, match=message),
        tracer.capture(response=torch.arange(6), tokens=batch.padded(list(range(6)))[2], **arguments),
    ):
        pass


def test_a_target_pass_without_a_step_is_refused() -> None:
    model, batch = tiny_model(), responses_of(APART)
    with InfluenceTracer(model, config=config_of(credit="position")) as tracer:
        with tracer.capture(response=torch.arange(6), tokens=batch.padded(list(range(6)))[2], role="target"):
            padded_objective(model, batch, list(range(6))).backward()
        with pytest.raises(AttributionError, match="role='step'"):
            tracer.score(accepted=batch.accepted, group=batch.group)


def test_small_damping_repeats_the_labels_and_says_so() -> None:
    model, batch = tiny_model(), responses_of(RIDING, groups=4, n=4)
    inverse = {"hessian_mode": "inverse", "credit": "position", "reg_lambda": 1e-9, "pairwise": False}
    labels = traced(model, batch, config_of(**inverse), RIDING)
    assert labels.metrics["influence_trace/label_r2"] > 0.999
    assert labels.metrics["influence_trace/effective_dof"] > 0.99
    assert "repeat" in labels.warnings[0]
    signs = torch.where(batch.advantages < 0, -1.0, 1.0)
    former = exact_config(reg_lambda=1e-9, pairwise=False)
    assert engine_scores(model, batch, former, sign=signs).metrics["influence_trace/label_r2"] > 0.999
    damped = traced(model, batch, config_of(**inverse | {"reg_lambda": 0.0, "reg_scale": 100.0}), RIDING)
    assert damped.metrics["influence_trace/effective_dof"] < 0.1
    assert damped.metrics["influence_trace/label_r2"] < 0.95 and not damped.warnings


@pytest.mark.parametrize(("mode", "said"), [("identity", False), ("optimizer", False), ("inverse", True)])
def test_totals_that_repeat_the_labels_are_told_where_damping_can_be_changed(mode: str, said: bool) -> None:
    model, batch = tiny_model(), responses_of(RIDING, groups=4, n=4)
    trace = traced(model, batch, config_of(hessian_mode=mode, credit="position", reg_scale=100.0), RIDING)
    assert not trace.warnings
    weights, lengths = torch.where(batch.accepted, 0.5, -0.5).double(), torch.full((len(batch.accepted),), 5)
    totals = Totals()
    totals.add(weights * lengths, weights, lengths, torch.ones_like(weights))
    totals.judge(trace)
    assert trace.metrics["influence_trace/label_r2"] > 0.999 and bool(trace.warnings) == said
