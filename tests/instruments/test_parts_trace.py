"""The default scores of a run, held against real steps in float64; training does not notice them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gradtrace import open_run
from gradtrace.instruments.contract import Observer, OptimizerStep
from gradtrace.instruments.influence.plan import cost_of_group, groups_to_measure
from gradtrace.policy.microbatch import MicroBatches
from gradtrace.training.host import open_instruments
from gradtrace.training.run import train
from tests.training import small

INFLUENCE = ("trainer.influence_trace.enable=true", "trainer.influence_trace.on_error=raise")
SHORT = ("trainer.total_steps=3", "trainer.validation.every=0", *INFLUENCE)


def run(folder: Path, *more: str) -> Any:
    return open_run(train(small.config(folder, *SHORT, *more)).run_dir)


def of_rows(step: Any, name: str) -> dict[int, np.ndarray]:
    """Row → its numbers [t] of a token column."""
    offsets = step["token_offsets"]
    rows = step["row"].tolist()
    return {row: step[name][offsets[i] : offsets[i + 1]] for i, row in enumerate(rows)}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of three steps, all of whose groups are measured."""
    return run(tmp_path_factory.mktemp("measured"), "trainer.influence_trace.measure=all")


class ByHand(Observer):
    """Takes mini-batches' real steps in a float64 copy of the model: with a gradient, and with a gradient of zero."""

    def __init__(self) -> None:
        self.host: Any = None
        self.found: dict[int, dict[str, Any]] = {}

    def before_step(self, update: OptimizerStep) -> None:
        if update.step == 1:
            return
        host = self.host
        own = copy.deepcopy(host.policy.model).double()
        policy = copy.copy(host.policy)
        policy.model, policy.full_precision = own, True
        names = [name for name, p in own.named_parameters()]
        adamw = host.optimizer
        places = {id(p): name for name, p in host.policy.model.named_parameters()}
        groups = [
            {
                **{k: v for k, v in g.items() if k not in ("params", "fused", "foreach")},
                "params": [dict(own.named_parameters())[places[id(p)]] for p in g["params"]],
            }
            for g in adamw.param_groups
        ]
        double = torch.optim.AdamW(groups)
        for p, state in adamw.state.items():
            target = dict(own.named_parameters())[places[id(p)]]
            double.state[target] = {k: v.double() if v.dim() else v.clone() for k, v in state.items()}
        source, slopes = host.training, dict[int, Tensor]()

        def terms() -> dict[int, Tensor]:
            """Row → every token's own term of J, in float64: linear in its log-prob, as its gradient before the step
            has it."""
            found = {}
            for micro in MicroBatches(source.batch, 4096, "padded")(update.rows):
                log_probs, entropies = (micro.unflatten(v) for v in policy.statistics(micro))
                first = int(micro.rows[0])
                if first not in slopes:
                    with torch.enable_grad():
                        leaf = log_probs.detach().clone().requires_grad_()
                        (slopes[first],) = torch.autograd.grad(source.terms(micro, leaf, entropies).sum(), leaf)
                weights = source.weights[micro.rows][:, None]
                values = -weights * slopes[first] * log_probs.double()
                for i, row in enumerate(micro.rows.tolist()):
                    found[row] = values[i, micro.mask[i]]
            return found

        def after(scale: float) -> dict[int, Tensor]:
            kept, state = copy.deepcopy(own.state_dict()), copy.deepcopy(double.state_dict())
            beta = double.param_groups[0]["betas"][1]
            for name, p in own.named_parameters():
                gradient = dict(host.policy.model.named_parameters())[name].grad
                if gradient is None:
                    continue
                p.grad = scale * gradient.double()
                if not scale:  # the second moment will be that of the real step
                    double.state[p]["exp_avg_sq"] += (1 - beta) / beta * gradient.double().square()
            double.step()
            with torch.no_grad():
                found = terms()
            own.load_state_dict(kept)
            double.load_state_dict(state)
            return found

        with torch.no_grad():
            before = terms()
        with_gradient, without = after(1.0), after(0.0)
        assert names
        for row in before:
            self.found[row] = {
                "by_batch": (with_gradient[row] - without[row]).numpy(),
                "whole": float((with_gradient[row] - before[row]).sum()),
                "momentum": float((without[row] - before[row]).sum()),
            }


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[int, dict[str, Any]]]:
    """The second step of a run with small learning rate, and what its real steps did."""
    folder = tmp_path_factory.mktemp("by_hand")
    options = ("trainer.total_steps=2", "actor.optim.lr=3e-4", "trainer.influence_trace.measure=all")
    trainer = small.trainer(folder, *SHORT, *options)
    trainer.steps = open_instruments(trainer.components, trainer.files, print)
    trainer.steps.add("by_hand", observer=(watcher := ByHand()))
    trainer.steps.reporters["by_hand"] = small.Observed()
    watcher.host = trainer.steps.host
    trainer.fit()
    trainer.steps.close()
    return open_run(folder / "run").step("influence_trace", 2), watcher.found


def test_scores_are_what_the_batch_s_gradient_does_to_each_token(by_hand: Any) -> None:
    step, found = by_hand
    scores = of_rows(step, "influence")
    assert scores
    predicted = np.concatenate([scores[row] for row in scores])
    measured = np.concatenate([found[row]["by_batch"] for row in scores])
    assert np.corrcoef(predicted, measured)[0, 1] > 0.999
    assert np.polyfit(measured, predicted, 1)[0] == pytest.approx(1.0, abs=0.03)


def test_the_books_hold_what_a_real_step_does_to_a_group(by_hand: Any) -> None:
    step, found = by_hand
    groups = step["group"]
    for g in np.unique(groups):
        rows = step["row"][groups == g].tolist()
        for name, key in (("objective_change", "whole"), ("change_by_momentum", "momentum")):
            assert step[name][g] == pytest.approx(sum(found[row][key] for row in rows), rel=2e-2, abs=1e-6), name


def test_scores_of_a_group_add_up_to_its_change_by_the_batch(measured: Any) -> None:
    for number in measured.steps("influence_trace"):
        step = measured.step("influence_trace", number)
        owner = np.repeat(step["group"], step["length"])
        for name, total in (("influence", "change_by_batch"), ("influence_own", "change_by_own")):
            sums = np.bincount(owner, weights=step[name], minlength=len(step["group_id"]))
            there = np.isfinite(step[total])
            assert there.any()
            np.testing.assert_allclose(sums[there], step[total][there], rtol=1e-4, atol=1e-9)


def test_effects_by_responses_add_up_to_the_score_on_the_own_prompt(measured: Any) -> None:
    step = measured.step("influence_trace", 2)
    own = of_rows(step, "influence_own")
    for r, row in enumerate(step["row"].tolist()):
        pairs = step.pairwise(r)
        assert pairs is not None
        assert set(pairs.members) == set(np.flatnonzero(step["group"] == step["group"][r]))
        np.testing.assert_allclose(pairs.scores.sum(1), own[row], rtol=2e-3, atol=1e-8)


@pytest.mark.parametrize("clip", [1e9, 1e-2])
def test_directions_of_groups_add_up_to_that_of_the_mini_batch(tmp_path: Path, clip: float) -> None:
    """With one group in a mini-batch, its own prompt is all that it is about; its gradient is clipped like all."""
    more = (
        f"actor.optim.grad_clip={clip}",
        "actor.mini_batch_size=1",
        "actor.optim.lr=1e-4",
        "trainer.influence_trace.measure=all",
    )
    step = run(tmp_path, *more).step("influence_trace", 2)
    np.testing.assert_allclose(step["influence_own"], step["influence"], rtol=5e-3, atol=1e-8)


def test_measured_groups_take_turns_and_others_have_gaps(tmp_path: Path) -> None:
    found = run(tmp_path, "trainer.influence_trace.measure=1")
    chosen = []
    for number in found.steps("influence_trace"):
        step = found.step("influence_trace", number)
        (group,) = np.flatnonzero(np.isfinite(step["objective_change"]))
        chosen.append(int(group))
        owner = np.repeat(step["group"], step["length"])
        assert (np.isfinite(step["influence_own"]) == (owner == group)).all()
        assert (np.isfinite(step["log_prob_after"]) == (owner == group)).all()
        assert np.isfinite(step["influence"]).all()
    assert len(set(chosen)) == len(chosen)


def test_strongest_tokens_name_what_became_likelier(measured: Any) -> None:
    step = measured.step("influence_trace", 3)
    found = step.meta["alternatives"]
    before, after = of_rows(step, "log_prob_before"), of_rows(step, "log_prob_after")
    ids = of_rows(step, "token_id")
    own = 0
    for one in found:
        assert all(now > then for _, then, now in one["gained"])
        for token, then, now in one["gained"]:
            if token == ids[one["row"]][one["token"]]:
                own += 1
                assert then == pytest.approx(np.exp(before[one["row"]][one["token"]]), rel=1e-3)
                assert now == pytest.approx(np.exp(after[one["row"]][one["token"]]), rel=1e-3)
    assert own


@pytest.mark.parametrize("layout", ["actor.share_prompts=never", "actor.token_budget=40", "rollout.n=1"])
def test_scores_do_not_depend_on_how_passes_are_cut(tmp_path: Path, layout: str) -> None:
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    base = ("algorithm.advantage=reinforce_plus_plus",) if layout == "rollout.n=1" else ()
    more = ("actor.token_budget=40",) if layout == "rollout.n=1" else (layout,)
    n = ("rollout.n=1",) if layout == "rollout.n=1" else ()
    one, other = (run(folder, *base, *n, *own) for folder, own in zip(folders, ((), more), strict=True))
    first, second = (found.step("influence_trace", 1) for found in (one, other))
    np.testing.assert_array_equal(first["row"], second["row"])
    np.testing.assert_allclose(first["influence"], second["influence"], rtol=2e-3, atol=2e-7)


def test_training_is_bit_identical_with_and_without(tmp_path: Path) -> None:
    found = []
    for name, more in (
        ("with", ("trainer.influence_trace.measure=all",)),
        ("without", ("trainer.influence_trace.enable=false",)),
    ):
        (tmp_path / name).mkdir()
        found.append(load_file(run(tmp_path / name, *more).path / "policy" / "model.safetensors"))
    first, second = found
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_clipped_tokens_take_no_step_and_have_no_influence(tmp_path: Path) -> None:
    """The second mini-batch is off policy; with a narrow clip range many of its ratios lie outside."""
    clip = ("algorithm.policy_loss_options.clip_low=1e-4", "algorithm.policy_loss_options.clip_high=1e-4")
    step = run(tmp_path, *clip, "trainer.influence_trace.measure=0").step("influence_trace", 1)
    late = np.repeat(step["optimizer_step"], step["length"]) > 0
    clipped = step["no_step"]
    assert not clipped[~late].any() and clipped[late].any() and not clipped[late].all()
    assert not step["influence"][clipped].any() and step["influence"][~clipped].all()


def test_metrics_of_measured_groups_are_those_of_the_file(measured: Any) -> None:
    for line in measured.metrics()[0]:
        step = measured.step("influence_trace", line["step"])
        change = np.nansum(step["objective_change"] - step["change_by_momentum"])
        expected = np.nansum(step["change_by_batch"]) / change
        assert line["influence_trace/predicted_over_measured"] == pytest.approx(expected, rel=1e-4)
        owner = np.repeat(np.arange(len(step["row"])), step["length"])
        moved = np.bincount(owner, step["log_prob_after"].astype(np.float64) - step["log_prob_before"])
        fell = (moved < 0)[step["advantage"] > 0]
        assert line["influence_trace/accepted_less_likely"] == pytest.approx(fell.mean())
        assert line["timing_s/influence_score"] > 0


@pytest.mark.parametrize("groups", [4, 400])
def test_measuring_by_default_costs_little_and_happens_in_every_tenth_step_at_least(groups: int) -> None:
    batch = small.random_batch(groups=groups, n=4)
    status = torch.zeros(groups, dtype=torch.long)
    chosen = [groups_to_measure(batch, status, turn, "auto", pairwise=True).tolist() for turn in range(20)]
    cost = cost_of_group(batch, torch.arange(groups), pairwise=True)
    per_step = sum(map(len, chosen)) / len(chosen)
    assert per_step >= 1 / 10 and (per_step * cost <= 0.03 or per_step == pytest.approx(1 / 10))
    seen = [group for some in chosen for group in some]
    assert len(set(seen)) == len(seen), "groups take turns"


def test_per_prompt_scores_every_group_on_its_own_prompt(tmp_path: Path) -> None:
    step = run(
        tmp_path, "trainer.influence_trace.accepted_rejected_scope=per_prompt", "trainer.influence_trace.measure=0"
    ).step("influence_trace", 2)
    assert np.isfinite(step["influence_own"]).all()
    assert "objective_change" not in step


def test_a_group_with_a_pass_of_its_own_yields_its_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores on the own prompt from gradients that training leaves are those of passes of their own."""
    own = ("trainer.influence_trace.accepted_rejected_scope=per_prompt", "trainer.influence_trace.measure=0")
    found = []
    for name in ("kept", "recomputed"):
        (tmp_path / name).mkdir()
        if name == "recomputed":
            monkeypatch.setattr("gradtrace.instruments.influence.observer.available_memory", lambda device: 0)
        more = ("actor.token_budget=28", "actor.optim.grad_clip=1e-2")
        step = run(tmp_path / name, *own, *more).step("influence_trace", 2)
        assert step.meta["own_gradients"][name] >= (2 if name == "kept" else 4)
        found.append(step["influence_own"])
    kept, recomputed = found
    np.testing.assert_allclose(kept, recomputed, rtol=2e-3, atol=1e-3 * np.abs(recomputed).max())


def test_a_learning_rate_of_zero_moves_nothing(tmp_path: Path) -> None:
    step = run(tmp_path, "actor.optim.lr=0", "trainer.influence_trace.measure=all").step("influence_trace", 1)
    assert not step["influence"].any()
    assert all(update["learning_rate"] == 0 for update in step.meta["updates"])


def test_the_first_step_says_that_adam_s_state_was_empty(measured: Any) -> None:
    first = measured.step("influence_trace", 1).meta["updates"]
    assert [update["second_moment"] for update in first] == ["batch_gradient", "state_with_batch"]
    later = measured.step("influence_trace", 2).meta["updates"]
    assert {update["second_moment"] for update in later} == {"state_with_batch"}


def test_the_base_of_the_difference_is_training_s_own_pass_bit_by_bit(tmp_path: Path) -> None:
    """Which saves a forward pass: log-probs that were kept are those of a pass of its own at the same weights."""

    class Compare(Observer):
        def __init__(self) -> None:
            self.host: Any = None
            self.equal: list[bool] = []

        def around_backward(self, backward: Any) -> Any:
            return self.host.keep(backward)

        def before_step(self, update: OptimizerStep) -> None:
            rows = self.host.own(update)
            with self.host.aside():
                kept = self.host.kept_values(rows, lambda one: one.log_probs)
                self.host._kept, before = [], self.host._kept
                assert before
                own = self.host.values(rows, lambda one: one.log_probs)
                self.host._kept = before
            self.equal.append(torch.equal(kept, own))

    watcher = Compare()
    trainer = small.trainer(tmp_path, "trainer.total_steps=2", "trainer.validation.every=0", observer=watcher)
    watcher.host = trainer.steps.host
    trainer.fit()
    assert watcher.equal and all(watcher.equal)
