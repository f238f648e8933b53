"""`gradtrace train engine=verl` on two CPU workers, end to end: a run of 12 steps whose workers are killed in every
phase. One run serves all tests of this file, since starting Ray takes most of the time."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from gradtrace import open_run
from gradtrace.config.loader import load_config
from gradtrace.instruments.entropy_probe import ProbeBatch
from gradtrace.instruments.tracin import TracinReason
from gradtrace.integrations.verl.driver.watch import Status, read_status
from gradtrace.training.terminal import SilentDisplay
from tests.integrations.verl import harness
from tests.training import small

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), harness.needs_verl]

STEPS = 12
PROBE_EVERY = 4
BLAME_EVERY = 2
REWARD = """
def ones(response, item):
    return response.count("1") / 8
"""
FAULTS = [
    (2, "rollout", "rollout replica 0.0"),
    (3, "rollout", "reward worker 0"),
    (4, "update", "actor rank 1"),
    (5, "save", "actor rank 0"),
]
"""From which step on, in which phase and which worker is killed; one after another, each in a life of its own."""


class Recorded(SilentDisplay):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


@dataclass
class Killer:
    """Waits for each fault's moment and kills the worker, as the kernel's out-of-memory killer would."""

    run_dir: Path
    done: list[tuple[int, str, str]] = field(default_factory=list)
    """The faults, with the steps in which they were made: a short phase may pass unseen on a busy machine."""
    stop: bool = False

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self) -> None:
        dying: dict[str, int] = {}
        for first, phase, worker in FAULTS:
            while not self.stop:
                time.sleep(0.003)
                try:
                    status = read_status(self.run_dir)
                except (OSError, ValueError):
                    continue
                is_new = worker in status.workers and status.workers != dying
                if is_new and status.step >= first and status.phase == phase and self.kill(worker, status):
                    self.done.append((status.step, phase, worker))
                    dying = status.workers
                    break

    def kill(self, worker: str, status: Status) -> bool:
        """Whether it was killed in the phase of `status`: it is held first, since a short phase may be over already."""
        process = status.workers[worker]
        os.kill(process, signal.SIGSTOP)
        time.sleep(0.05)
        try:
            is_there = read_status(self.run_dir) == status
        except (OSError, ValueError):
            is_there = False
        os.kill(process, signal.SIGKILL if is_there else signal.SIGCONT)
        return is_there


@dataclass
class Result:
    run_dir: Path
    messages: list[str]
    """What the launcher said, but for its progress."""
    killed: list[tuple[int, str, str]]
    finished: bool


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    from gradtrace.integrations.verl.launch.job import train

    folder = tmp_path_factory.mktemp("verl")
    (folder / "ones.py").write_text(REWARD)
    config = load_config(
        [
            *small.overrides(folder),
            "engine=verl",
            "cluster.num_workers=2",
            f"cluster.max_failures={len(FAULTS)}",
            f"trainer.total_steps={STEPS}",
            f"reward.path={folder / 'ones.py'}:ones",
            "data.max_prompt_length=8",
            "rollout.n=4",
            "actor.optim.lr=1e-2",
            "actor.optim.warmup_steps=0",
            "trainer.checkpoint.every=1",
            "trainer.validation.every=0",
            "trainer.entropy_trace.enable=true",
            "trainer.influence_trace.enable=true",
            "trainer.influence_trace.measure=1",
            "trainer.influence_trace.on_error=raise",
            "trainer.blame.enable=true",
            f"trainer.blame.write_every={BLAME_EVERY}",
            "trainer.blame.on_error=raise",
            "trainer.tracin.enable=true",
            "trainer.tracin.val_batch_size=4",
            "trainer.tracin.on_error=raise",
            f"trainer.entropy_probe.every={PROBE_EVERY}",
            "trainer.entropy_probe.prompts=6",
            "trainer.entropy_probe.on_error=raise",
        ]
    )
    display = Recorded()
    killer = Killer(folder / "runs" / "demo")
    outcome = train(config, display)
    killer.stop = True
    told = [text for text in display.messages if not text.startswith(("verl starts", "verl, "))]
    assert display.messages[0].startswith("verl starts") and len(told) < len(display.messages)
    return Result(outcome.run_dir, told, killer.done, outcome.finished)


def test_it_finishes_although_a_worker_was_killed_in_every_phase(result: Result) -> None:
    assert [fault[1:] for fault in result.killed] == [fault[1:] for fault in FAULTS]
    assert result.finished and len(result.messages) == len(FAULTS)


@pytest.mark.parametrize("number", range(len(FAULTS)), ids=[fault[2] for fault in FAULTS])
def test_the_launcher_says_who_died_and_in_which_phase(result: Result, number: int) -> None:
    (step, phase, worker), message = result.killed[number], result.messages[number]
    phase = "reward" if worker.startswith("reward") else phase
    assert message.startswith(worker), message
    assert f"died in phase {phase} of step {step}" in message
    assert "Restart" in message and f"the checkpoint of step {step - 1}" in message


def test_no_step_is_lost_or_doubled(result: Result) -> None:
    run = open_run(result.run_dir)
    records, _ = run.metrics()
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    for kind in ("entropy_trace", "influence_trace", "tracin"):
        assert list(run.steps(kind)) == list(range(1, STEPS + 1))


def test_one_trace_per_step_holds_all_ranks(result: Result) -> None:
    run = open_run(result.run_dir)
    with_scores = [n for n in range(1, STEPS + 1) if len(run.step("influence_trace", n)["group"])]
    assert len(with_scores) > STEPS // 2  # not all: late in the run, selection may leave no group with a contrast
    for step in (with_scores[0], with_scores[-1]):
        entropy, influence = run.step("entropy_trace", step), run.step("influence_trace", step)
        assert set(entropy["policy_version"]) == {step - 1}  # on policy
        assert len(entropy["group"]) == 16 and sorted(np.bincount(entropy["group"])) == [4, 4, 4, 4]
        scored = np.isin(np.arange(4), influence["group"]) == (influence["group_status"] == 0)
        assert scored.all() and influence["captured"].all()
        assert np.isfinite(influence["influence"]).all() and np.abs(influence["influence"]).max() > 0
        (measured,) = np.flatnonzero(np.isfinite(influence["objective_change"]))
        owner = np.repeat(influence["group"], influence["length"])
        assert (np.isfinite(influence["influence_own"]) == (owner == measured)).all()
        assert set(influence["optimizer_step"]) <= {0, 1}
    assert not list((result.run_dir / "ranks").iterdir())


def test_what_selection_dropped_is_not_trained_on(result: Result) -> None:
    run = open_run(result.run_dir)
    records = {record["step"]: record for record in run.metrics()[0]}
    dropped = 0
    for number in range(1, STEPS + 1):
        step, influence = run.step("tracin", number), run.step("influence_trace", number)
        candidates = step["reason"] != int(TracinReason.VALIDATION)
        assert candidates.sum() == 16 and (~candidates).sum() <= 16  # less what is a training prompt, too
        assert np.isnan(step["score"][~candidates]).all() and np.isfinite(step["score"][candidates]).all()
        kept = step["kept"][candidates]
        assert np.isin(influence["row"], step["row"][candidates][kept]).all()
        assert records[number]["tracin/selected"] == records[number]["perf/trained_responses"] == kept.sum()
        dropped += int((~kept).sum())
    assert dropped > STEPS  # one or two of the negative ones in most steps
    assert {"sign", "unit", "val_loss"} <= run.step("tracin", 1).meta.keys()


def test_probes_are_of_the_first_optimizer_step_and_say_what_it_does(result: Result) -> None:
    run = open_run(result.run_dir)
    assert list(run.steps("entropy_probe")) == list(range(PROBE_EVERY, STEPS + 1, PROBE_EVERY))
    records = {record["step"]: record for record in run.metrics()[0]}
    for number in run.steps("entropy_probe"):
        step, influence = run.step("entropy_probe", number), run.step("influence_trace", number)
        update = step["batch"] == int(ProbeBatch.UPDATE)
        assert 0 < update.sum() <= 8 and 2 <= len(set(step["group"][~update])) <= 6
        first = set(influence["row"][influence["optimizer_step"] == 0])
        assert first <= set(step["row"][update])  # of the first of two mini-batches
        found = {key.removeprefix("entropy_probe/"): value for key, value in records[number].items()}
        parts = step["share"][update].sum() + found["momentum_share"] + found["decay_share"]
        tolerance = 0.02 * float(np.abs(step["share"]).sum())  # the whole may be a small rest of large parts
        assert parts == pytest.approx(found["delta_h_predicted"], rel=0.01, abs=tolerance)
        assert found["errors"] == 0 and found["ess"] > 1 and found["timing_s/entropy_probe"] > 0
    assert not list((result.run_dir / "ranks").iterdir())


def test_blame_shares_every_gradient_out_and_the_detectors_read_it(result: Result) -> None:
    run = open_run(result.run_dir)
    records = {record["step"]: record for record in run.metrics()[0]}
    assert set(range(BLAME_EVERY, STEPS + 1, BLAME_EVERY)) <= set(run.steps("blame"))
    for number in range(BLAME_EVERY, STEPS + 1, BLAME_EVERY):
        step, kept = run.step("blame", number), run.step("tracin", number)
        trained = kept["kept"] & (kept["reason"] != int(TracinReason.VALIDATION))
        assert set(step["row"]) == set(kept["row"][trained])  # of both ranks, without what was dropped
        for update in step.meta["updates"]:
            shares = step["grad_share"][step["optimizer_step"] == update["number"]]
            # A later mini-batch may have a token at the edge of the clip range, where differences are half a slope.
            assert abs(update["residual"]) < (0.01 if update["number"] == 0 else 0.1)
            assert shares.sum() == pytest.approx(1.0 - update["residual"], abs=1e-4)
        assert (step["grad_norm"] > 0).any() and np.isfinite(step["grad_norm"]).all()
        missed = max(abs(update["residual"]) for update in step.meta["updates"])
        assert records[number]["blame/residual"] == pytest.approx(missed) and records[number]["blame/errors"] == 0
        assert records[number]["batch/prompt_gradient"] > 0  # what the detectors make of blame
        assert "findings/reward_hacking" in records[number]
    assert not list((result.run_dir / "ranks").iterdir())


def test_metrics_have_our_names(result: Result) -> None:
    records, _ = open_run(result.run_dir).metrics()
    for name in (
        *("critic/rewards/mean", "actor/entropy", "actor/grad_norm", "response_length/mean"),
        *("timing_s/step", "timing_s/gen", "timing_s/old_log_prob", "timing_s/update_actor"),
        *(
            "tracin/positive_ratio",
            "tracin/mean_ip",
            "tracin/selected",
            "tracin/val_reward",
            "timing_s/tracin",
        ),
        *("influence_trace/selected_responses", "influence_trace/uid_mixed", "influence_trace/rows_emitted"),
    ):
        assert all(name in record for record in records if record["step"] > result.killed[-1][0]), name
    unfinished = 1 - open_run(result.run_dir).step("entropy_trace", STEPS)["finished"].mean()
    assert records[-1]["response_length/clip_ratio"] == pytest.approx(unfinished)


def test_the_reward_rises(result: Result) -> None:
    rewards = [record["critic/rewards/mean"] for record in open_run(result.run_dir).metrics()[0]]
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.1


def test_it_says_that_it_is_active_and_on_which_ranks(result: Result) -> None:
    log = (result.run_dir / "verl.log").read_text()
    what = "entropy_trace, influence_trace, tracin, entropy_probe, blame"
    assert f"gradtrace is active: {what}; on ranks 0 to 1 of 2" in log
    assert "entropy probe active on rank 1 of 2" in log
    assert "influence trace active on rank 0 of 2" in log and "influence trace active on rank 1 of 2" in log


def test_the_policy_is_a_plain_transformers_folder(result: Result) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = result.run_dir / "policy"
    assert AutoModelForCausalLM.from_pretrained(policy).config.hidden_size == 16
    assert AutoTokenizer.from_pretrained(policy).eos_token == "<eos>"
