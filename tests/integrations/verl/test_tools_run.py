"""A whole verl job of several turns on two CPU workers: verl's own agent loop with tools calls the calculator, its
critic learns values, and its asynchronous trainer trains on responses of older weights, which its rollout correction
weighs. One job for all of it: starting Ray takes most of the time."""

from __future__ import annotations

import numpy as np
import pytest

from gradtrace import open_run
from gradtrace.config.loader import load_config
from gradtrace.tasks.calculator import ID, TAGS
from gradtrace.trace.reader import RunReader
from tests.integrations.verl import harness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), harness.needs_verl]

STEPS = 3
SHARE = "mismatch/share_of_update"
REWARD = """
def short(response, item):
    return 1 / (1 + len(response))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunReader:
    from gradtrace.integrations.verl.launch.job import train

    folder = tmp_path_factory.mktemp("tools")
    (folder / "short.py").write_text(REWARD)
    config = load_config(
        [
            "recipe=calculator",
            "engine=verl",
            "cluster.num_workers=2",
            f"trainer.runs_dir={folder / 'runs'}",
            f"reward.path={folder / 'short.py'}:short",
            "task.calculator.hidden_size=16",
            "task.calculator.layers=1",
            "task.calculator.heads=2",
            "task.calculator.warm_start.max_steps=2",
            "task.calculator.warm_start.corrupted_steps=0",
            "data.train_batch_size=4",
            "data.max_prompt_length=16",
            "rollout.n=4",
            "actor.mini_batch_size=0",
            f"trainer.total_steps={STEPS}",
            f"trainer.checkpoint.every={STEPS}",
            "trainer.validation.every=0",
            "trainer.mismatch_every=1",
            "trainer.influence_trace.on_error=raise",
            "trainer.blame.on_error=raise",
            "verl.trainer.v1.trainer_mode=colocate_async",
            "verl.algorithm.rollout_correction.rollout_is=token",
            "algorithm.advantage=gae",
            "critic.optim.lr=1e-3",
        ]
    )
    outcome = train(config)
    assert outcome.finished
    return open_run(outcome.run_dir)


def test_what_the_tool_wrote_stands_in_holes_of_the_loss_mask(run: RunReader) -> None:
    called = 0
    for number in range(1, STEPS + 1):
        step = run.step("entropy_trace", number)
        holes = ~step["loss_mask"].astype(bool)
        called += int(holes.sum())
        assert not holes.all()
        starts, ends = (step["token_id"] == ID[tag] for tag in TAGS[2:])
        # A random policy writes tags of its own; the tool's begin and end every hole.
        first = holes & ~np.roll(holes, 1)
        last = holes & ~np.roll(holes, -1)
        assert starts[first].all() and ends[last].all()
    assert called > 0


@pytest.mark.parametrize(
    ("kind", "column"),
    [
        ("influence_trace", "influence"),
        ("blame", "token_grad_share"),
    ],
)
def test_tokens_of_the_tool_are_never_scored_and_the_policys_are(run: RunReader, kind: str, column: str) -> None:
    of_the_tool, largest = 0, 0.0
    for number in range(1, STEPS + 1):
        step = run.step(kind, number)
        own = step["loss_mask"].astype(bool)
        assert np.isnan(step[column][~own]).all() and np.isfinite(step[column][own]).all()
        of_the_tool += int((~own).sum())
        largest = max(largest, np.abs(step[column][own]).max(initial=0.0))
    assert of_the_tool > 0 and largest > 0
    shares = run.step("blame", 1)
    told = [1.0 - update["residual"] for update in shares.meta["updates"]]
    assert np.nansum(shares["token_grad_share"]) == pytest.approx(sum(told), abs=1e-3)
    assert told[0] == pytest.approx(1.0, abs=0.01)


def test_the_critic_learns_and_advantages_are_of_single_tokens(run: RunReader) -> None:
    for record in run.metrics()[0]:
        assert record["critic/vf_loss"] > 0 and record["critic/grad_norm"] > 0
    assert (run.path / "checkpoints" / f"global_step_{STEPS}" / "critic").is_dir()


def test_responses_know_the_weights_that_sampled_them(run: RunReader) -> None:
    """verl's asynchronous trainer has a batch more under way than it trains on."""
    stale = 0
    for number in range(1, STEPS + 1):
        step = run.step("entropy_trace", number)
        assert (step["policy_version"] <= step["last_policy_version"]).all()
        assert (step["last_policy_version"] < number).all() and (step["policy_version"] >= 0).all()
        stale += int((step["policy_version"] < number - 1).sum())
    assert stale > 0
    shares = [record[SHARE] for record in run.metrics()[0] if SHARE in record]
    assert shares and all(0 < share < 1 for share in shares)  # of steps whose sampler had other weights


def test_tokens_are_weighed_by_the_rollout_correction(run: RunReader) -> None:
    """The sampler here is exact: weights are 1 where it had the weights that train, and near it where it had not."""
    for record in run.metrics()[0]:
        assert record["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=0.1)
        assert record["blame/errors"] == 0
