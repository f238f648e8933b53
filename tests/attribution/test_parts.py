"""Parts of tokens against real optimizer steps, in float64 throughout."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradtrace.attribution import AttributionError, InfluenceConfig, InfluenceTracer, parts
from gradtrace.attribution.collectives import Ranks
from gradtrace.attribution.parts import SHORT, WRONG, ComingStep, token_parts
from gradtrace.attribution.update import other_direction, step_direction
from gradtrace.policy.policy import KeepDouble
from tests.attribution.models import FAMILIES, Responses, random_responses, tiny_model, token_log_probs
from tests.attribution.test_model_kinds import exact, mixture

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1),
    "adam_l2": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.2),
    "nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
}


def own_terms(model: nn.Module, batch: Responses) -> list[Tensor]:
    """−w ℓ / R of every token, w being any weights."""
    ids, attention, tokens, weights = batch.padded(list(range(len(batch))))
    log_probs = token_log_probs(model(input_ids=ids, attention_mask=attention).logits, ids)
    terms = -weights * log_probs / len(batch)
    return [row[mask] for row, mask in zip(terms, tokens, strict=True)]


def trained(
    kind: str, steps: int = 3, family: str = "qwen2", model: nn.Module | None = None
) -> tuple[nn.Module, torch.optim.Optimizer, Responses]:
    """A model some steps into its training, with the gradient of the next batch in `.grad`."""
    model = model or tiny_model(family)
    optimizer = OPTIMIZERS[kind]([p for p in model.parameters() if p.requires_grad])
    for seed in range(steps):
        optimizer.zero_grad()
        torch.cat(own_terms(model, random_responses(seed=seed))).sum().backward()
        optimizer.step()
    batch = random_responses(seed=99)
    optimizer.zero_grad()
    torch.cat(own_terms(model, batch)).sum().backward()
    return model, optimizer, batch


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, gradient: dict[str, Tensor]) -> nn.Module:
    """A copy of the model after a real step of a copy of the optimizer with this gradient."""
    made: tuple[nn.Module, torch.optim.Optimizer] = copy.deepcopy((model, optimizer))
    own, steps = made
    for name, p in own.named_parameters():
        p.grad = gradient[name].clone() if name in gradient else None
    steps.step()
    return own


def difference(first: nn.Module, second: nn.Module, model: nn.Module) -> nn.Module:
    """The model with the difference of two others added to its weights."""
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for p, a, b in zip(moved.parameters(), first.parameters(), second.parameters(), strict=True):
            p.add_(a - b)
    return moved


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["momentum", "nesterov"])
def test_parts_are_what_a_real_step_does_less_what_it_does_without_this_gradient(kind: str, family: str) -> None:
    """Of optimizers whose step is linear in the gradient."""
    model, optimizer, batch = trained(kind, family=family)
    gradient = gradients(model)
    nothing = {name: torch.zeros_like(g) for name, g in gradient.items()}
    moved = difference(stepped(model, optimizer, gradient), stepped(model, optimizer, nothing), model)
    found = token_parts(model, optimizer, lambda: own_terms(model, batch))
    with torch.no_grad():
        expected = [a - b for a, b in zip(own_terms(model, batch), own_terms(moved, batch), strict=True)]
    for ours, theirs in zip(found.tokens, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-14)


@pytest.mark.parametrize("kind", ["adamw", "adam_l2", "amsgrad", "sgd"])
def test_parts_are_what_the_first_step_of_an_optimizer_does(kind: str) -> None:
    """Without momentum and decay the whole step is this batch's."""
    model, optimizer, batch = trained(kind, steps=0)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    moved = stepped(model, optimizer, gradients(model))
    found = token_parts(model, optimizer, lambda: own_terms(model, batch))
    with torch.no_grad():
        expected = [a - b for a, b in zip(own_terms(model, batch), own_terms(moved, batch), strict=True)]
    for ours, theirs in zip(found.tokens, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-13)
    assert found.second_moment == ("none" if kind == "sgd" else "batch_gradient")


@pytest.mark.parametrize("kind", ["adamw", "sgd", "rmsprop", "nadam"])
def test_training_on_a_token_does_for_the_objective_what_the_step_does_to_the_token(kind: str) -> None:
    """By brute force: a token's weight in the whole step is changed by half of itself, up and down."""
    model, optimizer, batch = trained(kind, steps=20)
    found = torch.cat(token_parts(model, optimizer, lambda: own_terms(model, batch)).tokens)
    both = torch.stack([found, effects_of_weights(model, optimizer, batch)])
    ranks = both.argsort(dim=1).argsort(dim=1).double()
    assert float(torch.corrcoef(both)[0, 1]) > 0.99 and float(torch.corrcoef(ranks)[0, 1]) > 0.95


def effects_of_weights(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Responses) -> Tensor:
    """float64[N]: what half of each token's weight in the step, more or less, does to J."""
    gradient, weights = gradients(model), {n: p for n, p in model.named_parameters() if p.requires_grad}
    measured = []
    for term in torch.cat(own_terms(model, batch)):
        own = torch.autograd.grad(term, list(weights.values()), retain_graph=True, materialize_grads=True)
        ends = []
        for factor in (0.5, -0.5):
            changed = {name: gradient[name] + factor * g for name, g in zip(weights, own, strict=True)}
            with torch.no_grad():
                ends.append(-float(torch.cat(own_terms(stepped(model, optimizer, changed), batch)).sum()))
        measured.append(ends[0] - ends[1])
    return torch.tensor(measured, dtype=torch.float64)


def test_the_books_balance() -> None:
    """Parts of a group add up to what the batch's gradient did to the group, those of all to what it did to all."""
    model, optimizer, batch = trained("adamw", steps=20)
    gradient = gradients(model)
    nothing = {name: torch.zeros_like(g) for name, g in gradient.items()}
    found = token_parts(model, optimizer, lambda: own_terms(model, batch))
    with torch.no_grad():
        after, idle = (own_terms(stepped(model, optimizer, g), batch) for g in (gradient, nothing))
    for group, part in found.of_groups(batch.group).items():
        rows = (batch.group == group).nonzero().squeeze(-1).tolist()
        measured = sum(float((idle[r] - after[r]).sum()) for r in rows)
        assert part == pytest.approx(measured, rel=0.1, abs=0.05 * abs(found.total))
    assert found.total == pytest.approx(sum(found.of_groups(batch.group).values()), rel=1e-12)


# ---------------------------------------------------------------- kinds of models


def adapted(**knobs: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    lora = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj", "down_proj"], **knobs)
    return get_peft_model(tiny_model(), lora).double()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lora": lambda: adapted(init_lora_weights=False),
    "lora at its start": adapted,
    "lora and a head that is trained": lambda: adapted(init_lora_weights=False, modules_to_save=["lm_head"]),
    "qwen2_moe": lambda: exact(mixture("qwen2_moe")),
    "mixtral": lambda: exact(mixture("mixtral")),
    "tied": lambda: tiny_model("llama", tied=True),
    "tied gpt2": lambda: tiny_model("gpt2", tied=True),
}


def moved_by_batch(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    """A copy after a real step that forgets what earlier batches left in the first moment, without weight decay."""
    own: tuple[nn.Module, torch.optim.Optimizer] = copy.deepcopy((model, optimizer))
    for state in own[1].state.values():
        state["exp_avg"].zero_()
    for group in own[1].param_groups:
        group["weight_decay"] = 0.0
    return stepped(*own, gradients(model))


@pytest.mark.parametrize("kind", MODELS)
def test_parts_of_every_kind_of_model_are_what_the_batch_brings_to_a_real_step(kind: str) -> None:
    with KeepDouble():
        model, optimizer, batch = trained("adamw", model=MODELS[kind]())
        found = token_parts(model, optimizer, lambda: own_terms(model, batch))
        assert found.moved and found.second_moment == "state_with_batch"
        moved = moved_by_batch(model, optimizer)
        with torch.no_grad():
            expected = [a - b for a, b in zip(own_terms(model, batch), own_terms(moved, batch), strict=True)]
    for ours, theirs in zip(found.tokens, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-14)


@pytest.mark.parametrize("kind", ["lora", "qwen2_moe", "mixtral", "tied"])
def test_the_two_readings_agree_for_every_kind_of_model(kind: str) -> None:
    with KeepDouble():
        model, optimizer, batch = trained("adamw", steps=20, model=MODELS[kind]())
        found = torch.cat(token_parts(model, optimizer, lambda: own_terms(model, batch)).tokens)
        both = torch.stack([found, effects_of_weights(model, optimizer, batch)])
    assert float(torch.corrcoef(both)[0, 1]) > 0.99


def test_rows_of_an_embedding_that_were_never_seen_move_as_in_a_real_step() -> None:
    """Their second moment is this batch's alone. With the state before the step, 0, they would explode."""
    model, optimizer, batch = trained("adamw")
    seen = {int(token) for ids in batch.sequences for token in ids}
    rare, embedding = max(seen), model.get_input_embeddings().weight  # type: ignore[operator]
    for key in ("exp_avg", "exp_avg_sq"):
        optimizer.state[embedding][key][rare] = 0.0
    found = token_parts(model, optimizer, lambda: own_terms(model, batch))
    moved = moved_by_batch(model, optimizer)
    with torch.no_grad():
        expected = [a - b for a, b in zip(own_terms(model, batch), own_terms(moved, batch), strict=True)]
    for ours, theirs in zip(found.tokens, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-14)
    step = dict(step_direction(model, optimizer, gradients(model)))["model.embed_tokens.weight"]
    assert 0 < float(step[rare].abs().max()) <= optimizer.param_groups[0]["lr"]


def test_no_second_copy_of_the_direction_exists() -> None:
    """The direction is made weight by weight: of all the others at that moment there is none."""
    model, optimizer, batch = trained("adamw")
    alive: list[weakref.ref[Tensor]] = []
    at_once: list[int] = []

    def noted(*arguments: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        for name, step in step_direction(*arguments, **options):
            alive.append(weakref.ref(step))
            at_once.append(sum(one() is not None for one in alive))
            yield name, step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "step_direction", noted)
        token_parts(model, optimizer, lambda: own_terms(model, batch))
    assert len(at_once) == len(list(model.parameters())) and max(at_once) <= 2


# ---------------------------------------------------------------- in the objective of a group


def rows_of(batch: Responses) -> dict[int, list[int]]:
    return {g: (batch.group == g).nonzero().squeeze(-1).tolist() for g in sorted(set(batch.group.tolist()))}


def test_measured_parts_are_what_a_step_of_the_groups_own_gradient_does() -> None:
    model, optimizer, batch = trained("momentum")
    found = token_parts(model, optimizer, lambda: own_terms(model, batch), measured=rows_of(batch))
    nothing = {name: torch.zeros_like(g) for name, g in gradients(model).items()}
    idle = stepped(model, optimizer, nothing)
    for group, rows in rows_of(batch).items():
        model.zero_grad()
        torch.stack([own_terms(model, batch)[row].sum() for row in rows]).sum().backward()
        moved = difference(stepped(model, optimizer, gradients(model)), idle, model)
        assert found.measured[group].responses == rows
        with torch.no_grad():
            before, after = own_terms(model, batch), own_terms(moved, batch)
        for row, ours in zip(rows, found.measured[group].tokens, strict=True):
            torch.testing.assert_close(ours, before[row] - after[row], rtol=1e-8, atol=1e-14)


@pytest.mark.parametrize("kind", ["adamw", "rmsprop"])
def test_measured_parts_are_what_training_on_a_token_does_for_its_own_group(kind: str) -> None:
    """By brute force, as above. The mini-batch's parts answer another question."""
    model, optimizer, batch = trained(kind, steps=20)
    found = token_parts(model, optimizer, lambda: own_terms(model, batch), measured=rows_of(batch))
    gradient, names = gradients(model), [name for name, _ in model.named_parameters()]
    terms = own_terms(model, batch)
    for group, rows in rows_of(batch).items():
        measured, ours = [], torch.cat(found.measured[group].tokens)
        for term in torch.cat([terms[row] for row in rows]):
            own = torch.autograd.grad(term, list(model.parameters()), retain_graph=True)
            ends = []
            for factor in (0.5, -0.5):
                changed = {name: gradient[name] + factor * g for name, g in zip(names, own, strict=True)}
                with torch.no_grad():
                    after = own_terms(stepped(model, optimizer, changed), batch)
                ends.append(-float(torch.stack([after[row].sum() for row in rows]).sum()))
            measured.append(ends[0] - ends[1])
        both = torch.stack([ours, torch.tensor(measured, dtype=torch.float64)])
        assert float(torch.corrcoef(both)[0, 1]) > 0.99


def test_directions_of_all_groups_add_up_to_that_of_the_mini_batch() -> None:
    """Also after clipping; to first order, therefore, the parts that all groups bring to a token."""
    model, optimizer, batch = trained("adamw")
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    gradient = gradients(model)
    step = ComingStep(model, optimizer, gradient, lambda: own_terms(model, batch), Ranks())
    factor = float(
        gradient["lm_head.weight"].norm() / step.gradient_of(range(len(batch)), 1.0)["lm_head.weight"].norm()
    )
    whole = dict(step_direction(model, optimizer, gradient))
    parts = [
        dict(step_direction(model, optimizer, gradient, of=step.gradient_of(rows, factor)))
        for rows in rows_of(batch).values()
    ]
    for name, whole_step in whole.items():
        torch.testing.assert_close(sum(part[name] for part in parts), whole_step, rtol=1e-9, atol=1e-15)


def test_groups_are_measured_in_turn() -> None:
    model, optimizer, batch = trained("adamw")
    tracer, group = InfluenceTracer(model, optimizer), torch.arange(len(batch)) % 3
    calls = [tracer.parts(lambda: own_terms(model, batch), group=group, measure=2).measured for _ in range(3)]
    assert [list(call) for call in calls] == [[0, 1], [2, 0], [1, 2]]
    assert calls[1][2].responses == list(range(2, len(batch), 3))
    assert sorted(tracer.parts(lambda: own_terms(model, batch), group=group, measure=9).measured) == [0, 1, 2]
    with pytest.raises(AttributionError, match=r"measure=1 .* give group"):
        tracer.parts(lambda: own_terms(model, batch), measure=1)


def test_the_whole_step_is_this_gradient_and_the_rest() -> None:
    model, optimizer, _ = trained("adamw")
    gradient = gradients(model)
    after = dict(stepped(model, optimizer, gradient).named_parameters())
    own, other = (dict(find(model, optimizer, gradient)) for find in (step_direction, other_direction))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter + own[name] + other[name], after[name], rtol=1e-12, atol=1e-14)


def test_nothing_is_changed() -> None:
    model, optimizer, batch = trained("adamw")
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), gradients(model)))
    token_parts(model, optimizer, lambda: own_terms(model, batch), measured=rows_of(batch))
    for found, kept in zip((model.state_dict(), gradients(model)), (before[0], before[2]), strict=True):
        assert all(torch.equal(found[name], value) for name, value in kept.items())
    state = optimizer.state_dict()["state"]
    for number, kept in before[1]["state"].items():
        assert all(torch.equal(torch.as_tensor(state[number][key]), torch.as_tensor(v)) for key, v in kept.items())


def test_without_a_learning_rate_nothing_moves_and_it_says_so() -> None:
    model, optimizer, batch = trained("adamw")
    optimizer.param_groups[0]["lr"] = 0.0
    found = token_parts(model, optimizer, lambda: own_terms(model, batch), measured={0: [0, 1]})
    assert not found.moved and found.total == 0.0 and [len(own) for own in found.tokens] == batch.lengths()
    assert [float(own.abs().sum()) for own in found.measured[0].tokens] == [0.0, 0.0]


def test_terms_are_right_where_a_large_step_bends_their_sum() -> None:
    model, optimizer, batch = trained("adamw")
    optimizer.param_groups[0]["lr"] *= 300
    along = ComingStep(model, optimizer, gradients(model), lambda: own_terms(model, batch), Ranks())
    assert abs(along.change_of_terms(fraction=SHORT).ratio - 1) > WRONG
    assert token_parts(model, optimizer, lambda: own_terms(model, batch), clip_factor=1.0).moved


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_in_less_than_float64_give_nearly_the_same(dtype: torch.dtype) -> None:
    """bf16 is too coarse for a difference and goes forward mode."""
    model, optimizer, batch = trained("adamw")
    expected = torch.cat(token_parts(model, optimizer, lambda: own_terms(model, batch)).tokens)
    own = copy.deepcopy(model).to(dtype)
    steps = torch.optim.AdamW(own.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for p, q in zip(own.parameters(), model.parameters(), strict=True):
        p.grad = q.grad.to(dtype)  # type: ignore[union-attr]
        state = optimizer.state[q]
        steps.state[p] = {k: v.to(dtype) if v.dim() else v for k, v in state.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch.cat(token_parts(own, steps, lambda: own_terms(own, batch)).tokens)
    assert float(torch.corrcoef(torch.stack([found, expected]))[0, 1]) > (0.98 if dtype == torch.bfloat16 else 0.9999)


def test_the_tracer_has_no_hooks_for_parts_and_refuses_to_capture() -> None:
    model, optimizer, batch = trained("adamw")
    expected = token_parts(model, optimizer, lambda: own_terms(model, batch))
    for config in (None, InfluenceConfig(), InfluenceConfig(target="output_function")):
        tracer = InfluenceTracer(model, optimizer, config)
        assert sum(len(module._forward_hooks) for module in model.modules()) == 0
        found = tracer.parts(lambda: own_terms(model, batch))
        assert all(torch.equal(a, b) for a, b in zip(found.tokens, expected.tokens, strict=True))
        for door in (tracer.capture, tracer.score, tracer.begin, tracer.attach):
            with pytest.raises(AttributionError, match=r"no captured factors: call parts\(terms\)"):
                door()
    with pytest.raises(AttributionError, match=r"InfluenceTracer\(model, optimizer\)"):
        InfluenceTracer(model).parts(lambda: own_terms(model, batch))


def test_scores_from_factors_are_imported_when_they_are_asked_for() -> None:
    code = (
        "import sys, torch; from gradtrace.attribution import InfluenceConfig, InfluenceTracer;"
        "model = torch.nn.Sequential(torch.nn.Linear(2, 2));"
        "InfluenceTracer(model); print(any('attribution.factors.' in name for name in sys.modules));"
        "InfluenceTracer(model, config=InfluenceConfig.older());"
        "print('gradtrace.attribution.factors.engine' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert said == ["False", "True"]


# ---------------------------------------------------------------- mistakes


def test_clipping_is_found_out_and_checked() -> None:
    model, optimizer, batch = trained("adamw")
    whole = token_parts(model, optimizer, lambda: own_terms(model, batch)).clip_factor
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    assert whole == 1.0 and norm > 0.2
    with pytest.warns(UserWarning, match="After clipping that is right"):
        found = token_parts(model, optimizer, lambda: own_terms(model, batch))
    assert found.clip_factor == pytest.approx(0.1 / norm, rel=0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        token_parts(model, optimizer, lambda: own_terms(model, batch), clip_factor=0.1 / norm)
    with pytest.raises(AttributionError, match="do not add up"):
        token_parts(model, optimizer, lambda: own_terms(model, batch), clip_factor=0.9)


@pytest.mark.parametrize("mistake", ["shifted", "mask", "half", "sign", "scale"])
def test_terms_of_another_loss_are_an_error(mistake: str) -> None:
    model, optimizer, batch = trained("adamw")

    def wrong() -> list[Tensor]:
        ids, attention, tokens, weights = batch.padded(list(range(len(batch))))
        log_probs = token_log_probs(model(input_ids=ids, attention_mask=attention).logits, ids)
        if mistake == "shifted":
            weights = weights.roll(-1, 1)
        if mistake == "mask":  # at the positions that predict the tokens
            tokens, weights = tokens.roll(-1, 1), weights.roll(-1, 1)
        found = [row[mask] for row, mask in zip(-weights * log_probs / len(batch), tokens, strict=True)]
        if mistake == "half":
            return [*found[:3], *[torch.zeros_like(own) for own in found[3:]]]
        factor = {"sign": -1.0, "scale": 0.5}.get(mistake, 1.0)
        return [factor * own for own in found]

    with pytest.raises(AttributionError, match="do not add up"):
        token_parts(model, optimizer, wrong)


def test_an_optimizer_of_another_model_or_without_gradients_is_an_error() -> None:
    model, optimizer, batch = trained("adamw")
    other = torch.optim.AdamW(list(model.parameters())[:3], lr=1e-3)
    with pytest.raises(AttributionError, match=r"does not own .* parameters that have a gradient, such as"):
        token_parts(model, other, lambda: own_terms(model, batch))
    unknown = torch.optim.Rprop(model.parameters(), lr=1e-3)
    with pytest.raises(
        AttributionError, match="Rprop is not known; those of torch's Adagrad, Adam, AdamW, Adamax, NAdam"
    ):
        token_parts(model, unknown, lambda: own_terms(model, batch))
    factored = torch.optim.Adafactor(model.parameters(), lr=1e-3)
    with pytest.raises(AttributionError, match="Adafactor is not known"):
        token_parts(model, factored, lambda: own_terms(model, batch))
    coded = copy.deepcopy(optimizer.state[next(model.parameters())])
    optimizer.state[next(model.parameters())]["exp_avg_sq"] = torch.zeros(3, dtype=torch.uint8)
    with pytest.raises(AttributionError, match="exp_avg_sq` as a code"):
        token_parts(model, optimizer, lambda: own_terms(model, batch))
    optimizer.state[next(model.parameters())] = coded
    optimizer.zero_grad()
    with pytest.raises(AttributionError, match=r"after loss\.backward"):
        token_parts(model, optimizer, lambda: own_terms(model, batch))


def test_terms_that_draw_or_a_bad_gradient_are_an_error() -> None:
    model, optimizer, batch = trained("adamw")
    calls = iter(range(9))
    with pytest.raises(AttributionError, match="must not draw"):
        token_parts(model, optimizer, lambda: own_terms(model, batch)[next(calls) % 2 :])
    next(iter(model.parameters())).grad[0] = torch.nan  # type: ignore[index]
    with pytest.raises(AttributionError, match="is not finite"):
        token_parts(model, optimizer, lambda: own_terms(model, batch))
