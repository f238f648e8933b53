"""Blame: shares of ‖g‖² that are autograd's, add up to one, and cost training nothing but time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradtrace import open_run
from gradtrace.algorithms import Denominator, aggregate
from gradtrace.attribution import directional_derivative
from gradtrace.batch import RolloutBatch
from gradtrace.cli import main
from gradtrace.instruments.blame.report import WHAT, blame
from gradtrace.instruments.blame.reporter import StepBlame
from gradtrace.instruments.blame.sharing import Sharing
from gradtrace.instruments.whole_model import WholeModel
from gradtrace.metrics import Timer
from gradtrace.policy.microbatch import MicroBatches
from gradtrace.training.host import open_instruments
from gradtrace.training.loop import Trainer
from tests.instruments.test_traces import run, weights
from tests.training import small

ROUNDING = 1e-7
"""Everything is float64 but the weights that aggregation gives to tokens, which hosts say in float32."""
BLAME = ("trainer.blame.enable=true", "trainer.blame.on_error=raise", "trainer.blame.write_every=1")


def last_blame(trainer):
    """What the blame instrument found in the last step."""
    return trainer.steps.reporters["blame"].last


def one_step(tmp_path: Path, *more: str) -> tuple[Trainer, RolloutBatch, StepBlame, dict[str, torch.Tensor], float]:
    """A trained step in float64: the trainer, the batch, its blame, the weights before, the norm that was logged."""
    trainer = small.trainer(
        tmp_path,
        *BLAME,
        "trainer.blame.sketch_dim=1000",
        "trainer.validation.every=0",
        "actor.optim.warmup_steps=0",
        *more,
    )
    model = trainer.components.policy.model.double()
    if trainer.components.reference is not None:
        trainer.components.reference.own.model.double()  # type: ignore[union-attr]
    trainer.steps = open_instruments(trainer.components, trainer.files, print)
    trainer.steps.start(0)
    batch, _ = trainer.experience.collect(trainer.components.generators["rollout"], Timer())
    batch = batch.replace(sampler_log_probs=batch.sampler_log_probs.double())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    batch, metrics = trainer.train_step(batch, 1, Timer())
    trainer.steps.close()
    blame = last_blame(trainer)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(before[name])
    return trainer, batch, blame, before, metrics["actor/grad_norm"]


def loss_of(trainer: Trainer, batch: RolloutBatch, chosen: torch.Tensor) -> torch.Tensor:
    """The loss with the terms of the tokens `chosen` bool[R, T] alone, by plain autograd over one padded pass."""
    loss = trainer.update.loss
    rows = torch.arange(len(batch))
    micro = next(MicroBatches(batch, 10**6)(rows))
    log_probs, entropies = (micro.unflatten(values) for values in loss.policy.statistics(micro))
    terms, penalties, _ = loss.losses(batch, micro, log_probs, entropies)
    terms = torch.stack([terms, *penalties]).sum(0) * chosen[micro.rows]
    denominator = Denominator.of(batch.response_mask, loss.max_response_length)
    return aggregate(terms, micro.mask, loss.algorithm.aggregation, denominator)


def flat_gradient(trainer: Trainer, loss: torch.Tensor, linear: bool = False) -> torch.Tensor:
    named = list(trainer.components.policy.model.named_parameters())
    kept = [p for name, p in named if not linear or ("proj" in name and name.endswith("weight"))]
    found = torch.autograd.grad(loss, kept, allow_unused=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(kept, found, strict=True)])


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("algorithm.aggregation=sequence_mean", "actor.packing=always", "actor.token_budget=40"),
        ("algorithm.kl_coef=0.3", "algorithm.entropy_coef=0.01", "actor.optim.grad_clip=0.01"),
    ],
    ids=["plain", "packed", "kl-and-clipping"],
)
def test_shares_norms_and_products_equal_brute_force_autograd(tmp_path: Path, more: tuple[str, ...]) -> None:
    trainer, batch, blame, _, logged = one_step(tmp_path, "actor.mini_batch_size=0", *more)
    whole = flat_gradient(trainer, loss_of(trainer, batch, batch.response_mask))
    square = float(whole @ whole)
    assert blame.updates[0]["grad_norm"] == pytest.approx(square**0.5, rel=1e-8) == pytest.approx(logged, rel=1e-8)
    assert float(blame.share.sum()) == pytest.approx(1.0, abs=ROUNDING)
    own = []
    for row in range(len(batch)):
        chosen = torch.zeros_like(batch.response_mask)
        chosen[row] = batch.response_mask[row]
        gradient = flat_gradient(trainer, loss_of(trainer, batch, chosen))
        assert float(blame.response_share[row]) == pytest.approx(float(gradient @ whole) / square, abs=ROUNDING)
        own.append(flat_gradient(trainer, loss_of(trainer, batch, chosen), linear=True))
        assert float(blame.norm[row]) == pytest.approx(float(own[-1].norm()), rel=1e-7)
    stacked = torch.stack(own)
    assert torch.allclose(blame.kernel(), stacked @ stacked.T / square, atol=ROUNDING)
    for row, token in ((0, 0), (3, 1)):
        chosen = torch.zeros_like(batch.response_mask)
        chosen[row, token] = True
        gradient = flat_gradient(trainer, loss_of(trainer, batch, chosen))
        assert float(blame.share[row, token]) == pytest.approx(float(gradient @ whole) / square, abs=ROUNDING)


def test_push_is_what_a_plain_gradient_step_does_to_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradtrace.policy.padding_row.padded_embeddings", lambda model: [])
    trainer, batch, blame, before, _ = one_step(tmp_path, "actor.mini_batch_size=0")
    model = trainer.components.policy.model
    loss = loss_of(trainer, batch, batch.response_mask)
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    micro = next(MicroBatches(batch, 10**6)(torch.arange(len(batch))))
    values = []
    for rate in (1e-6, -1e-6):
        with torch.no_grad():
            for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
                parameter.copy_(before[name] - rate * (0 if gradient is None else gradient))
            values.append(micro.unflatten(trainer.components.policy.statistics(micro)[0]))
    measured = (values[0] - values[1]) / 2e-6
    assert torch.allclose(blame.push[micro.rows, : measured.shape[1]], measured, rtol=1e-4, atol=1e-7)


def test_the_optimizers_move_is_batch_momentum_and_decay(tmp_path: Path) -> None:
    """After a first mini-batch the second has momentum; all parts add up to one."""
    _, _, blame, _, _ = one_step(tmp_path, "actor.optim.weight_decay=0.1")
    assert len(blame.updates) == 2
    for update in blame.updates:
        assert sum(update[name] for name in ("from_batch", "from_momentum", "from_decay")) == pytest.approx(1.0)
        assert abs(update["residual"]) < ROUNDING
    assert blame.updates[0]["from_momentum"] == 0.0 != blame.updates[1]["from_momentum"]
    assert blame.updates[0]["from_decay"] != 0.0


def test_weights_are_bit_identical_with_blame_on_and_off(tmp_path: Path) -> None:
    common = ("trainer.total_steps=3", "actor.epochs=2")
    plain, traced_dir = weights(run(tmp_path, *common)), run(tmp_path, *common, *BLAME)
    traced = weights(traced_dir)
    for name, tensor in plain.items():
        assert torch.equal(tensor, traced[name]), name
    step = open_run(traced_dir).step("blame", 3)
    for number in np.unique(step["optimizer_step"]):
        assert step["grad_share"][step["optimizer_step"] == number].sum() == pytest.approx(1.0, abs=1e-3)
    assert {"blame/top_response", "blame/top_prompt", "blame/residual"} <= small.metrics(traced_dir)[-1].keys()


def test_between_the_steps_that_are_due_only_an_unusual_gradient_is_shared_out(tmp_path: Path) -> None:
    """Here every gradient after the first eight is unusual: it need only be above a hundredth of the median."""
    common = ("trainer.total_steps=6", "trainer.validation.every=0", *BLAME, "trainer.blame.write_every=100")
    rare = open_run(run(tmp_path, *common, "trainer.blame.unusual_ratio=0"))
    assert not rare.steps("blame")
    assert all("blame/largest_grad_norm" in line for line in small.metrics(rare.path))
    found = open_run(run(tmp_path, *common, "trainer.blame.unusual_ratio=0.01"))
    assert found.steps("blame") and found.steps("blame")[0] > 2 and found.verify() == []
    step = found.step("blame", 6)
    assert step.meta["skipped"] == []
    for number in np.unique(step["optimizer_step"]):
        assert step["grad_share"][step["optimizer_step"] == number].sum() == pytest.approx(1.0, abs=1e-3)


def test_a_gradient_that_is_not_finite_still_names_its_response(tmp_path: Path) -> None:
    """The step is skipped, so there are no shares; the norms of the single responses say who broke it."""
    trainer = small.trainer(tmp_path, *BLAME, "trainer.validation.every=0", "actor.mini_batch_size=0")
    trainer.steps = open_instruments(trainer.components, trainer.files, print)
    trainer.steps.start(0)
    batch, _ = trainer.experience.collect(trainer.components.generators["rollout"], Timer())
    spoil = trainer.estimator

    def broken(inputs: object) -> object:
        outputs = spoil(inputs)
        outputs.advantages[5, 0] = torch.inf
        return outputs

    broken.needs = spoil.needs  # type: ignore[attr-defined]
    trainer.estimator = broken  # type: ignore[assignment]
    trainer.train_step(batch, 1, Timer())
    blame = last_blame(trainer)
    trainer.steps.close()
    assert blame.skipped == [0] and not blame.updates
    assert (~blame.norm.isfinite()).nonzero().flatten().tolist() == [5]


# ---------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def blamed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blamed")
    more = (*BLAME, "trainer.entropy_probe.every=2", "trainer.entropy_probe.prompts=4")
    return run(folder, "trainer.total_steps=3", "algorithm.kl_coef=0.1", "trainer.validation.every=0", *more)


@pytest.mark.parametrize("what", WHAT)
def test_every_list_of_shares_adds_up_to_the_event(blamed: Path, what: str) -> None:
    opened = open_run(blamed)
    report = blame(opened, what, 2, top=10**6)
    rest = sum(part.share for part in report.rest) if what == "entropy" else 0.0
    lists = (report.prompts, report.responses, report.tokens or report.responses)
    sums = [sum(part.share for part in parts) + rest for parts in lists]
    if what == "grad_norm":
        event = 1.0
    elif what == "entropy":
        event = opened.step("entropy_probe", 2).meta["delta_h_predicted"]
    else:
        column = {"kl": "reference_gap"}.get(what, what)
        event = opened.step("blame", 2)[column].mean() - opened.step("blame", 1)[column].mean()
    assert sums == pytest.approx([event] * 3, abs=1e-4 * max(1.0, abs(event)))


def test_cancelled_tokens_moved_against_their_advantage_and_name_an_opponent(blamed: Path) -> None:
    parts = blame(open_run(blamed), "grad_norm", 2, top=5).cancelled
    assert parts and all("advantage -" in part.note if part.share > 0 else "advantage +" in part.note for part in parts)
    assert any("sibling" in part.note or "another prompt" in part.note for part in parts)


def test_the_command_prints_tables_and_json(blamed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["blame", str(blamed)]) == 0
    shown = capsys.readouterr().out
    assert "responses" in shown and "momentum" in shown and "moved against" in shown
    assert main(["blame", str(blamed), "--what", "length", "--step", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 3


def test_a_run_without_blame_is_told_what_to_turn_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path, "trainer.total_steps=1", "trainer.validation.every=0")
    assert main(["blame", str(folder)]) == 2
    assert "trainer.traces=true" in capsys.readouterr().err


class DifferencesHost(WholeModel):
    """Takes derivatives as a host with shards does."""

    is_exact = False

    def derivative(
        self, run: Callable[[], Tensor], direction: Mapping[str, Tensor], step: float = 1.0, rate: float | None = None
    ) -> Tensor:
        return directional_derivative(self.model, run, direction, "finite_difference", step_scale=step)


@pytest.mark.parametrize("edge", [1e-4, 1.0])
def test_a_token_beside_its_clip_range_is_shared_out_by_a_shorter_step(edge: float) -> None:
    """Differences see half a slope where the usual step reaches over the edge; the sum is known and gives it away."""
    model = nn.Linear(4, 3, bias=False)
    nn.init.constant_(model.weight, 0.5)
    inputs = torch.eye(4)

    def terms() -> Tensor:
        log_probs = model(inputs).flatten()
        losses = log_probs.clamp(max=0.5 + edge)
        return torch.stack([losses, log_probs])

    terms()[0].sum().backward()
    gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    sharing = Sharing(DifferencesHost(model), model, torch.optim.SGD(model.parameters(), lr=1.0), [])
    usual = directional_derivative(model, terms, gradient, "finite_difference")[0]
    shares, about = sharing.share_out(terms, gradient, 1.0, 0)
    misses = abs(1.0 - float(usual.sum()) / about["grad_norm"] ** 2)
    assert (misses > 0.1) == (edge < 1.0), "the usual step should reach over the near edge, and not over the far one"
    assert abs(about["residual"]) < 1e-3 and shares[0].sum() == pytest.approx(1.0, abs=1e-3)
