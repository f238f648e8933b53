"""The update: which rows when, which old log-probs, and what a bad gradient does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.instruments.contract import Backward, Observer, OptimizerStep, Reporter, Rows, Table
from gradtrace.metrics import Timer
from gradtrace.policy.loss import fill_statistics
from gradtrace.policy.microbatch import MicroBatches
from gradtrace.policy.optimizer import learning_rate
from gradtrace.policy.rollouts import add_advantages
from gradtrace.policy.settings import OptimConfig
from gradtrace.training.update import plan_updates
from tests.training.small import random_batch, trainer


def collected(run) -> RolloutBatch:  # type: ignore[no-untyped-def]
    batch, _ = run.experience.collect(run.components.generators["rollout"], Timer())
    return batch


@given(st.integers(1, 7), st.integers(0, 7), st.integers(1, 3), st.booleans(), st.integers(0, 9))
def test_every_epoch_trains_on_every_kept_response_once(
    groups: int, size: int, epochs: int, shuffle: bool, seed: int
) -> None:
    batch = random_batch(groups, 2, seed=seed)
    kept = torch.rand(len(batch), generator=torch.Generator().manual_seed(seed)) < 0.7
    updates = plan_updates(batch.replace(kept=kept), size, epochs, shuffle, 1, torch.Generator())
    assert [update.number for update in updates] == list(range(len(updates)))
    for epoch in range(epochs):
        rows = [update.rows for update in updates if update.epoch == epoch]
        seen = torch.cat(rows) if rows else torch.empty(0, dtype=torch.long)
        assert sorted(seen.tolist()) == kept.nonzero().squeeze(-1).tolist()
        for part in rows:
            assert not size or len(batch.group[part].unique()) <= size


def test_nothing_kept_is_no_update() -> None:
    batch = random_batch()
    assert plan_updates(batch.replace(kept=torch.zeros(9, dtype=torch.bool)), 2, 2, True, 1, torch.Generator()) == []


def test_groups_stay_whole() -> None:
    batch = random_batch(6, 4)
    for update in plan_updates(batch, 2, 1, True, 1, torch.Generator()):
        assert all(int((batch.group[update.rows] == g).sum()) in (0, 4) for g in range(6))


def test_the_update_writes_to_no_column_of_the_batch_it_was_given(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    batch = add_advantages(collected(run), run.estimator)
    given = torch.full_like(batch.sampler_log_probs, -7.0)
    batch = batch.replace(old_log_probs=given.clone(), entropies=given.clone())
    updates = plan_updates(batch, 0, 1, False, 1, torch.Generator())
    done, _ = run.update.run(batch, MicroBatches(batch, 4096), updates)
    assert torch.equal(batch.need("old_log_probs"), given) and torch.equal(batch.need("entropies"), given)
    assert not torch.equal(done.need("old_log_probs"), given)


@pytest.mark.parametrize("source", ["auto", "recompute", "sampler"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_old_log_probs_are_those_of_the_sampling_policy(tmp_path: Path, source: str, epochs: int) -> None:
    """Wherever they come from, they are what the weights before the step give for the same tokens."""
    run = trainer(tmp_path, f"actor.old_log_probs={source}", f"actor.epochs={epochs}")
    batch = collected(run)
    expected = batch.sampler_log_probs.clone()
    trained, metrics = run.train_step(batch, 1, Timer())
    torch.testing.assert_close(trained.old_log_probs, expected, rtol=1e-4, atol=1e-5)
    assert metrics["actor/grad_norm"] > 0


def test_all_sources_of_old_log_probs_train_alike(tmp_path: Path) -> None:
    weights = []
    for source in ("recompute", "sampler"):
        run = trainer(tmp_path, f"actor.old_log_probs={source}", "actor.optim.lr=1e-3")
        run.train_step(collected(run), 1, Timer())
        weights.append(torch.cat([p.detach().flatten() for p in run.components.policy.model.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-3, atol=1e-5)


class Poison(Observer):
    """Makes the gradients of one mini-batch NaN: stands for an overflow in the backward pass."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.steps: list[int] = []

    @contextlib.contextmanager
    def around_backward(self, backward: Backward) -> Iterator[None]:
        yield
        if backward.update.number == self.number:
            self.parameter.grad.fill_(torch.nan)  # type: ignore[union-attr]

    def before_step(self, update: OptimizerStep) -> None:
        self.steps.append(update.number)

    def after_step(self, update: OptimizerStep, moved: bool) -> None:
        assert moved == (update.number != self.number)

    parameter: torch.nn.Parameter


def test_non_finite_gradient_skips_its_update_and_is_counted(tmp_path: Path) -> None:
    observer = Poison(number=1)
    run = trainer(tmp_path, "actor.epochs=2", observer=observer)
    observer.parameter = next(iter(run.components.policy.trainable().values()))
    _, metrics = run.train_step(collected(run), 1, Timer())
    assert metrics["actor/skipped_updates"] == 1
    assert observer.steps == [0], "there is no step of the bad mini-batch, and a second epoch is not observed"
    taken = [int(n) for name, n in run.components.optimizer.state_tensors().items() if name.startswith("step/")]
    assert set(taken) == {3}, "the first mini-batch and both of the second epoch"
    assert all(bool(p.isfinite().all()) for p in run.components.policy.model.parameters())
    assert all(bool(v.isfinite().all()) for v in run.components.optimizer.state_tensors().values())


def test_a_step_of_nothing_but_bad_gradients_leaves_the_weights(tmp_path: Path) -> None:
    observer = Poison(number=0)
    run = trainer(tmp_path, "actor.mini_batch_size=0", observer=observer)
    observer.parameter = next(iter(run.components.policy.trainable().values()))
    before = [p.detach().clone() for p in run.components.policy.model.parameters()]
    run.train_step(collected(run), 1, Timer())
    assert all(torch.equal(a, b) for a, b in zip(before, run.components.policy.model.parameters(), strict=True))


class Select(Reporter):
    def plan(self, batch: RolloutBatch, step: int, sampled: RolloutBatch | None) -> tuple[RolloutBatch, None]:
        return batch.replace(kept=batch.group == 1), None


def test_update_uses_kept_responses_only_and_is_normalised_over_them(tmp_path: Path) -> None:
    """The same weights as training on a batch that has those responses alone."""
    selected = trainer(tmp_path, "actor.mini_batch_size=0", reporter=Select())
    batch = collected(selected)
    selected.train_step(batch, 1, Timer())
    alone = trainer(tmp_path, "actor.mini_batch_size=0")
    alone.train_step(batch.select(batch.group == 1), 1, Timer())
    pairs = zip(selected.components.policy.model.parameters(), alone.components.policy.model.parameters(), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


class Calls(Reporter):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def plan(self, batch: RolloutBatch, step: int, sampled: RolloutBatch | None) -> tuple[RolloutBatch, Tensor]:
        assert batch.advantages is not None and batch.rewards is not None
        self.calls.append("plan")
        return batch, batch.response_lengths

    def write(self, batch: RolloutBatch, step: int, table: Table | None) -> dict[str, float]:
        assert table is not None and table.facts == {"found": 7}
        self.calls.append("write")
        return {"record/calls": float(len(self.calls))}


class Hooks(Observer):
    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def begin(self, plan: Tensor) -> None:
        super().begin(plan)
        self.lengths = plan
        self.table.facts = {"found": 7}

    def before_passes(self, update: OptimizerStep, rows: Rows) -> None:
        tokens = self.lengths[update.rows].sum()  # aggregation=token_mean
        assert torch.equal(rows.ids, update.rows)
        torch.testing.assert_close(rows.weights * tokens, torch.ones_like(rows.weights))
        self.calls.append(f"passes {update.mini_batch}")

    @contextlib.contextmanager
    def around_backward(self, backward: Backward) -> Iterator[None]:
        tokens = self.lengths[backward.update.rows].sum()
        torch.testing.assert_close(backward.weights * tokens, torch.ones_like(backward.weights))
        self.calls.append(f"forward {backward.update.epoch}.{backward.update.mini_batch}")
        yield
        self.calls.append("backward done")

    def before_step(self, update: OptimizerStep) -> None:
        self.calls.append(f"step {update.number}")

    def after_step(self, update: OptimizerStep, moved: bool) -> None:
        self.calls.append(f"stepped {moved}")


def test_both_halves_are_called_in_order_in_the_first_epoch_and_their_metrics_are_logged(tmp_path: Path) -> None:
    calls = Calls()
    run = trainer(tmp_path, "actor.epochs=2", reporter=calls, observer=Hooks(calls.calls))
    _, metrics = run.train_step(collected(run), 1, Timer())
    expected = ["plan"]
    for number in range(2):
        expected += [f"passes {number}", f"forward 0.{number}", "backward done", f"step {number}", "stepped True"]
    assert calls.calls == [*expected, "write"]
    assert metrics["record/calls"] == len(calls.calls)


class WantsEntropies(Reporter):
    def needs_entropies(self, step: int) -> bool:
        return True


def test_entropies_are_complete_and_of_the_sampling_policy_when_asked_for(tmp_path: Path) -> None:
    run = trainer(tmp_path, reporter=WantsEntropies())
    batch = collected(run)
    expected = fill_statistics(run.components.policy, batch, MicroBatches(batch, 10**6), torch.arange(len(batch)))
    trained, _ = run.train_step(batch, 1, Timer())
    torch.testing.assert_close(trained.entropies, expected.entropies, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_learning_rate_warms_up_and_ends_where_it_should(schedule: str) -> None:
    config = OptimConfig(lr=2.0, warmup_steps=4, schedule=schedule, min_lr_ratio=0.1)
    rates = [learning_rate(config, step, 20) for step in range(1, 21)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[-1] == pytest.approx(2.0 if schedule == "constant" else 0.2)
    assert all(a >= b for a, b in pairwise(rates[3:]))
    assert learning_rate(config, 1000, 20) == pytest.approx(rates[-1])
    if schedule == "cosine":
        assert learning_rate(config, 12, 20) == pytest.approx(1.1)
