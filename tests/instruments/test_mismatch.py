"""What the sampler's log-probs not being the trainer's does to an update: exact, emulated on a CPU, in the files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from playwright.sync_api import expect
from torch import Tensor

import gradtrace
from gradtrace.algorithms.settings import AlgorithmConfig
from gradtrace.attribution.collectives import Ranks
from gradtrace.batch import RolloutBatch
from gradtrace.config.loader import load_config
from gradtrace.errors import GradtraceError
from gradtrace.instruments.mismatch.share import MismatchObserver, MismatchReporter
from gradtrace.instruments.observers import Observers
from gradtrace.instruments.record import Record
from gradtrace.policy.loss import PolicyLoss, fill_statistics
from gradtrace.policy.microbatch import MicroBatches
from gradtrace.policy.optimizer import Optimizer
from gradtrace.policy.settings import OptimConfig
from gradtrace.training.host import EmbeddedHost, loss_traits
from gradtrace.training.run import train
from gradtrace.training.update import PolicyUpdate, plan_updates
from tests.training import small
from tests.viewer.serving import Watched, chromium, serving

CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None}


def mismatched(scale: float) -> tuple[small.Policy, RolloutBatch]:
    """A policy and responses whose sampler was another one, by noise of this size; float64."""
    policy, batch = small.policy(), small.random_batch()
    micro_batches = MicroBatches(batch, 64)
    own = fill_statistics(policy, batch, micro_batches, torch.arange(len(batch))).need("old_log_probs")
    noise = torch.randn(own.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return policy, batch.replace(sampler_log_probs=(own + scale * noise) * batch.response_mask)


def brute_force(policy: small.Policy, batch: RolloutBatch, with_ratio: bool) -> Tensor:
    """The gradient of −mean_t min(ρ A, clip(ρ) A), one response at a time, by plain autograd."""
    total = torch.zeros((), dtype=torch.float64)
    for row, ids in enumerate(batch.response_ids):
        prompt = batch.prompts[int(batch.group[row])]
        logits = policy.model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        log_probs = torch.log_softmax(logits, -1)[torch.arange(len(ids)), torch.tensor(ids)]
        old = batch.sampler_log_probs[row, : len(ids)] if with_ratio else log_probs.detach()
        ratio, weight = (log_probs - old).exp(), batch.need("advantages")[row, : len(ids)]
        kept = torch.minimum(ratio * weight, ratio.clamp(0.8, 1.28) * weight)
        total = total - kept.sum()
    found = torch.autograd.grad(total / int(batch.response_mask.sum()), list(policy.trainable().values()))
    return torch.cat([gradient.flatten() for gradient in found])


def share(policy: small.Policy, batch: RolloutBatch, mini_batch: int = 0) -> dict[str, float]:
    algorithm = AlgorithmConfig(policy_loss="ppo", policy_loss_options=dict(CLIP), aggregation="token_mean")
    optimizer = Optimizer(policy.trainable(), OptimConfig(), 1)
    host = EmbeddedHost(policy, optimizer, loss_traits(algorithm))
    observers = Observers(Ranks(), {"mismatch": MismatchObserver(host)}, raising=["mismatch"])
    reporter = MismatchReporter(Record(None, 1))
    reporter.largest = 1.0
    update = PolicyUpdate(PolicyLoss(policy, algorithm, 6), optimizer)
    batch, plan = reporter.plan(batch, 1, None)
    observers.begin({"mismatch": plan})
    updates = plan_updates(batch, mini_batch, 1, False, 1, torch.Generator())
    batch, _ = update.run(batch, MicroBatches(batch, 24), updates, observers, host)
    return reporter.write(batch, 1, observers.end()["mismatch"])


@pytest.mark.parametrize("scale", [0.05, 1.0])
def test_the_share_is_that_of_two_gradients_by_brute_force(scale: float) -> None:
    policy, batch = mismatched(scale)
    with_ratio, without = (brute_force(policy, batch, wanted) for wanted in (True, False))
    found = share(policy, batch)
    difference = with_ratio - without
    assert found["mismatch/share_of_update"] == pytest.approx(float(difference.norm() / with_ratio.norm()), rel=1e-5)
    of_norm = float((difference @ with_ratio) / (with_ratio @ with_ratio))
    assert found["mismatch/share_of_squared_norm"] == pytest.approx(of_norm, rel=1e-5)
    assert found["mismatch/share_of_update"] > scale / 4


def test_a_sampler_that_agrees_has_no_share_and_costs_no_pass() -> None:
    policy, batch = mismatched(0.0)
    assert share(policy, batch)["mismatch/share_of_update"] < 1e-6
    _, plan = MismatchReporter(Record(None, 1)).plan(batch, 1, None)
    assert plan is None, "nothing is measured where the step before found no disagreement"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for precision in ("float32", "bfloat16"):
        folder = tmp_path_factory.mktemp(precision)
        knobs = (f"rollout.precision={precision}", "trainer.mismatch_every=1", "trainer.total_steps=3")
        traced = ("trainer.entropy_trace.enable=true", "trainer.influence_trace.enable=true")
        found[precision] = train(small.config(folder, *knobs, *traced)).run_dir
    return found


def test_sampling_in_bfloat16_makes_a_mismatch_that_metrics_and_files_show(runs: dict[str, Path]) -> None:
    exact, rounded = (gradtrace.open_run(runs[name]) for name in ("float32", "bfloat16"))
    for run, low, high in ((exact, 0.0, 1e-4), (rounded, 1e-3, 0.5)):
        line = small.metrics(run.path)[-1]
        assert low <= line["mismatch/max_ratio"] - 1 < high
        for kind in ("entropy_trace", "influence_trace"):
            step = run.step(kind, 3)
            np.testing.assert_allclose(step["ratio"], np.exp(step["log_prob"] - step["sampler_log_prob"]), rtol=1e-4)
            assert low <= np.abs(step["ratio"] - 1).max() < high
    share_of_update = small.metrics(rounded.path)[-1]["mismatch/share_of_update"]
    assert 1e-4 < share_of_update < 0.5
    assert not any("mismatch/share_of_update" in line for line in small.metrics(exact.path))


def test_the_viewer_has_the_difference_as_a_channel(runs: dict[str, Path]) -> None:
    from gradtrace.viewer.scores import load_step

    view = load_step(gradtrace.open_run(runs["bfloat16"]), 3)
    assert view is not None
    channel = view.column("mismatch")
    assert channel is not None
    step = gradtrace.open_run(runs["bfloat16"]).step("entropy_trace", 3)
    np.testing.assert_allclose(channel, step["log_prob"] - step["sampler_log_prob"], atol=1e-5)


@pytest.mark.parametrize("word", ["rollout.precision=float16", "trainer.mismatch_every=-1"])
def test_a_wrong_value_is_refused(word: str) -> None:
    with pytest.raises(GradtraceError, match=word.split("=")[0]):
        load_config([word])


def test_the_run_page_charts_the_share_where_it_was_measured(runs: dict[str, Path]) -> None:
    with chromium() as browser:
        for name, count in (("bfloat16", 1), ("float32", 0)):
            with serving([runs[name]]) as address:
                watched = Watched(browser.new_page(viewport={"width": 1440, "height": 900}), address)
                page = watched.open("#/run")
                expect(page.get_by_text("Reward", exact=True).first).to_be_visible()
                expect(page.get_by_text("Update due to sampler ≠ trainer")).to_have_count(count)
                assert watched.errors == []
