"""Identity 7 of TracIn: ghost = tangent = products of autograd gradients, whatever the model and the split."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradtrace
from gradtrace.attribution import AttributionError
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.tracin.losses import aggregated, training_losses
from gradtrace.instruments.tracin.selector import Piece, TracInSelector, countable
from gradtrace.metrics import Timer
from gradtrace.policy.microbatch import Sequences
from gradtrace.training.host import open_instruments
from tests.attribution.models import FAMILIES, Responses, padded_objective, random_responses, tiny_model
from tests.training import small

SPLITS = ([[0, 1, 2, 3, 4, 5]], [[3, 0], [5], [1, 4, 2]])


def losses(model: nn.Module, batch: Responses, rows: list[int]) -> Tensor:
    """[r]: −Σ w ℓ of each response."""
    ids, attention, _, weights = batch.padded(rows)
    logits = model(input_ids=ids, attention_mask=attention).logits
    scores = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return -(scores * weights[:, 1:]).sum(1)


def pieces(model: nn.Module, batch: Responses, split: list[list[int]]) -> list[Piece]:
    return [
        Piece(
            torch.tensor(rows),
            lambda rows=rows: losses(model, batch, rows),
            torch.tensor(rows),
            batch.padded(rows)[2],
        )
        for rows in split
    ]


def autograd_products(
    model: nn.Module, batch: Responses, validation: Responses, parameters: str, exclude: tuple[str, ...] = ()
) -> Tensor:
    """[R]: ⟨∇L_val, ∇L_r⟩ from gradients that autograd makes, one response at a time."""
    names = list(countable(model, parameters, exclude))
    weights = [dict(model.named_parameters())[name] for name in names]

    def gradient(loss: Tensor) -> list[Tensor]:
        found = torch.autograd.grad(loss, weights, allow_unused=True)
        return [torch.zeros_like(w) if g is None else g for w, g in zip(weights, found, strict=True)]

    target = gradient(-padded_objective(model, validation, [0, 1, 2, 3]))
    products = [
        sum((a * b).sum() for a, b in zip(gradient(losses(model, batch, [r])[0]), target, strict=True))
        for r in range(len(batch))
    ]
    return torch.stack(products)  # type: ignore[arg-type]


def validation_losses(model: nn.Module, validation: Responses) -> list:
    return [lambda rows=rows: -padded_objective(model, validation, rows) for rows in ([0, 1], [2, 3])]


@pytest.mark.parametrize("split", SPLITS, ids=["whole", "micro-batches"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_both_methods_equal_products_of_autograd_gradients(family: str, tied: bool, split: list[list[int]]) -> None:
    model, batch, validation = tiny_model(family, tied), random_responses(), random_responses(seed=9)
    expected = autograd_products(model, batch, validation, "linear")
    assert any(name.endswith("bias") for name in countable(model, "linear", ())) == (family != "llama")
    for method in ("ghost", "tangent"):
        selector = TracInSelector(model, method)
        selector.set_validation(validation_losses(model, validation))
        scores = selector.score(pieces(model, batch, split))
        assert torch.allclose(scores, expected, rtol=1e-8, atol=1e-9), method


def test_all_parameters_count_more_than_linear_layers() -> None:
    model, batch, validation = tiny_model(), random_responses(), random_responses(seed=9)
    selector = TracInSelector(model, parameters="all")
    selector.set_validation(validation_losses(model, validation))
    scores = selector.score(pieces(model, batch, SPLITS[1]))
    assert torch.allclose(scores, autograd_products(model, batch, validation, "all"), rtol=1e-8, atol=1e-9)
    assert not torch.allclose(scores, autograd_products(model, batch, validation, "linear"), rtol=1e-4)


@pytest.mark.parametrize("method", ["ghost", "tangent"])
def test_lora_adapters_are_scored_and_frozen_weights_are_not(method: str) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    config = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = get_peft_model(tiny_model(), config).double()
    batch, validation = random_responses(), random_responses(seed=9)
    selector = TracInSelector(model, method)
    selector.set_validation(validation_losses(model, validation))
    assert all("lora_" in name for name in selector.gradient)
    scores = selector.score(pieces(model, batch, SPLITS[1]))
    assert torch.allclose(scores, autograd_products(model, batch, validation, "linear"), rtol=1e-8, atol=1e-9)


class WithValueHead(nn.Module):
    """As TRL's models: a value head beside the language model; here the loss reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = tiny_model()
        self.v_head = nn.Linear(13, 1).double()

    def get_input_embeddings(self) -> nn.Module:
        return self.lm.get_input_embeddings()

    def forward(self, **inputs: Tensor):
        output = self.lm(**inputs)
        output.logits = output.logits + self.v_head(output.logits)
        return output


@pytest.mark.parametrize("method", ["ghost", "tangent"])
def test_a_value_head_does_not_count(method: str) -> None:
    torch.manual_seed(0)
    model, batch, validation = WithValueHead(), random_responses(), random_responses(seed=9)
    selector = TracInSelector(model, method)
    selector.set_validation(validation_losses(model, validation))
    assert not any("v_head" in name for name in selector.gradient)
    scores = selector.score(pieces(model, batch, SPLITS[0]))
    expected = autograd_products(model, batch, validation, "linear", ("v_head",))
    assert torch.allclose(scores, expected, rtol=1e-8, atol=1e-9)


def test_scores_ride_on_a_training_backward_and_leave_its_gradients_alone() -> None:
    model, batch, validation = tiny_model(), random_responses(), random_responses(seed=9)
    selector = gradtrace.TracInSelector(model, "ghost")
    selector.set_validation(validation_losses(model, validation))
    for rows in SPLITS[1]:
        with selector.capture(response=torch.tensor(rows), tokens=batch.padded(rows)[2]):
            losses(model, batch, rows).sum().backward()
    ridden = selector.captured(len(batch))
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    own = selector.score(pieces(model, batch, SPLITS[0]))
    assert torch.allclose(ridden, own, rtol=1e-9)
    model.zero_grad()
    for rows in SPLITS[1]:
        losses(model, batch, rows).sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is None or torch.equal(p.grad, gradients[name]), name


def test_scores_predict_what_a_step_on_one_response_does_to_the_validation_loss() -> None:
    """The sign: descending on a response with a positive score lowers the validation loss, by rate · score."""
    model, batch, validation = tiny_model(), random_responses(), random_responses(seed=9)
    selector = TracInSelector(model, parameters="all")
    selector.set_validation(validation_losses(model, validation))
    scores = selector.score(pieces(model, batch, SPLITS[0]))
    rate, before = 1e-6, float(-padded_objective(model, validation, [0, 1, 2, 3]).detach())
    for r in (0, 3):
        gradient, _ = selector.gradient_of([lambda r=r: losses(model, batch, [r])[0]])
        named = dict(model.named_parameters())
        with torch.no_grad():
            for name, g in gradient.items():
                named[name] -= rate * g
            after = float(-padded_objective(model, validation, [0, 1, 2, 3]))
            for name, g in gradient.items():
                named[name] += rate * g
        assert (before - after) / rate == pytest.approx(float(scores[r]), rel=1e-3, abs=1e-5)


def test_a_response_in_no_piece_is_nan_not_zero() -> None:
    model, batch, validation = tiny_model(), random_responses(), random_responses(seed=9)
    selector = TracInSelector(model)
    selector.set_validation(validation_losses(model, validation))
    scores = selector.score(pieces(model, batch, [[0, 2]]), responses=4)
    assert torch.isnan(scores).tolist() == [False, True, False, True]


def test_mistakes_name_their_cause() -> None:
    model = tiny_model()
    with pytest.raises(AttributionError, match="method is 'gost'"):
        TracInSelector(model, "gost")
    with pytest.raises(AttributionError, match="linear layers only"):
        TracInSelector(model, "ghost", "all")
    selector = TracInSelector(model)
    with pytest.raises(AttributionError, match="call set_validation first"):
        selector.score([])
    with pytest.raises(AttributionError, match="validation set is empty"):
        selector.set_validation([])
    with pytest.raises(AttributionError, match="names none of the"):
        selector.set_validation_gradient({"lm.head": torch.zeros(2)})
    with pytest.raises(AttributionError, match="does not depend on any trainable parameter"):
        selector.set_validation(lambda: torch.zeros(()))
    checkpointed = tiny_model().train()
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(AttributionError, match="gradient checkpointing"):
        TracInSelector(checkpointed, parameters="all")
    ghost = TracInSelector(model, "ghost")
    ghost.set_validation(lambda: -padded_objective(model, random_responses(), [0]))
    with pytest.raises(AttributionError, match="which position belongs to which response"):
        ghost.score([Piece(torch.tensor([0]), lambda: torch.zeros(1))])


# ---------------------------------------------------------------- inside the loop


def scored_step(folder: Path, *more: str, steps: int = 1) -> tuple[Tensor, Tensor]:
    """Scores of the last of some real steps: by the instrument, and by the definition."""
    knobs = (
        "trainer.tracin.enable=true",
        "trainer.tracin.val_batch_size=4",
        "trainer.tracin.train_on_validation=false",
        *more,
    )  # step 1: no preconditioner yet
    trainer = small.trainer(folder, *knobs)
    trainer.steps = open_instruments(trainer.components, trainer.files, print)
    seen = _Remember(trainer)
    for step in range(1, steps + 1):
        batch, _ = trainer.experience.collect(trainer.components.generators["rollout"], Timer())
        trainer.train_step(batch, step, Timer())
    trainer.steps.close()
    return seen.scores, seen.expected


class _Remember:
    """The reporter of a trainer, and what it saw before the weights moved."""

    def __init__(self, trainer) -> None:
        self.trainer = trainer
        self.reporter = trainer.steps.reporters["tracin"]
        self.plan, self.reporter.plan = self.reporter.plan, self.planned

    def planned(self, batch: RolloutBatch, step: int, sampled: RolloutBatch | None):
        result = self.plan(batch, step, sampled)
        self.expected = products(self.trainer, self.reporter, batch)
        self.scores = self.reporter._step.scores
        return result


def products(trainer, reporter, batch: RolloutBatch) -> Tensor:
    """[R]: products of autograd gradients of the definition, response by response, padded, no engine."""
    validation = reporter.source.current.batch
    policy = trainer.components.policy
    weights = list(trainer.steps.observers.observers["tracin"].selector.counted.values())

    def gradient(objective: Tensor) -> list[Tensor]:
        found = torch.autograd.grad(objective, weights, allow_unused=True)
        return [torch.zeros_like(w) if g is None else g for w, g in zip(weights, found, strict=True)]

    def weighted(of: RolloutBatch, rows: Tensor) -> Tensor:
        micro = Sequences.of(of).padded(rows)
        own = of.advantages[rows, : micro.mask.shape[1]]
        return (micro.unflatten(policy.statistics(micro)[0]) * own).sum()

    target = gradient(-weighted(validation, torch.arange(len(validation))) / len(validation))
    optimizer = trainer.components.optimizer.adamw
    if reporter.settings.preconditioner == "adam" and optimizer.state:
        optim = optimizer.defaults
        for index, weight in enumerate(weights):
            state = optimizer.state[weight]
            corrected = state["exp_avg_sq"] / (1 - optim["betas"][1] ** state["step"])
            target[index] = target[index] / (corrected.sqrt() + optim["eps"])
    tokens = float(batch.response_mask.sum())
    return torch.stack(
        [
            sum(
                (a * b).sum()
                for a, b in zip(gradient(-weighted(batch, torch.tensor([r])) / tokens), target, strict=True)
            )
            for r in range(len(batch))
        ]
    ).double()


@pytest.mark.parametrize(
    "more",
    [
        ("trainer.tracin.method=ghost",),
        ("trainer.tracin.method=tangent",),
        ("trainer.tracin.method=tangent", "actor.token_budget=40", "trainer.tracin.diagnose_every=0"),
        ("trainer.tracin.method=ghost", "actor.token_budget=40", "trainer.tracin.diagnose_every=0"),
        ("trainer.tracin.method=tangent", "model.attention=eager"),
        ("trainer.tracin.method=ghost", "model.lora.rank=2"),
        ("trainer.tracin.method=tangent", "model.lora.rank=2", "trainer.tracin.parameters=all"),
        ("model.gradient_checkpointing=true",),
    ],
    ids=[
        "ghost",
        "tangent",
        "tangent-micro",
        "ghost-micro",
        "eager",
        "lora",
        "lora-tangent",
        "checkpointing",
    ],
)
def test_scores_in_the_loop_equal_products_of_gradients_on_the_same_batch(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    scores, expected = scored_step(tmp_path, *more)
    assert float(scores.abs().max()) > 1e-4
    assert torch.allclose(scores, expected, rtol=1e-3, atol=1e-5 * float(scores.abs().max())), (
        scores,
        expected,
    )


@pytest.mark.parametrize("diagnose_every", [0, 1])
def test_after_the_first_update_scores_are_weighed_as_adam_weighs_its_step(tmp_path: Path, diagnose_every: int) -> None:
    knobs = (f"trainer.tracin.diagnose_every={diagnose_every}", "model.lora.rank=2")
    scores, expected = scored_step(tmp_path, *knobs, steps=3)
    size = float(scores.abs().max())
    assert torch.allclose(scores, expected, rtol=2e-3, atol=1e-4 * size), (scores, expected)
    plain, _ = scored_step(tmp_path, *knobs, "trainer.tracin.preconditioner=none", steps=3)
    assert float(plain.abs().max()) < size / 10


def test_weights_that_correct_for_the_sampler_are_part_of_every_responses_loss() -> None:
    """As twice the advantage would be."""
    batch = small.random_batch()
    weights = torch.rand(batch.response_mask.shape, dtype=torch.float64) + 0.5
    weigh = aggregated("token_mean", 8)
    corrected = training_losses(batch.replace(loss_weights=weights), weigh)
    expected = training_losses(batch.replace(advantages=batch.need("advantages") * weights), weigh)
    assert torch.allclose(corrected.weights, expected.weights) and torch.equal(corrected.rows, expected.rows)
    assert not torch.allclose(corrected.weights, training_losses(batch, weigh).weights)
