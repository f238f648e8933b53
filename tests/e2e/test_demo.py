"""The demo, as a newcomer starts it: it learns, it is reproducible, and it leaves what it promises."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from gradtrace import open_run
from gradtrace.commands.resampling import Resampler
from gradtrace.commands.view import LiveSampling
from gradtrace.instruments.counterfactual.columns import stored_groups
from gradtrace.instruments.counterfactual.measure import results
from gradtrace.tasks.arithmetic import STOP, ArithmeticTask
from gradtrace.tasks.settings import ArithmeticConfig
from tests.viewer.serving import Watched, chromium, serving


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`gradtrace train`, without arguments, in an empty folder."""
    folder = tmp_path_factory.mktemp("demo")
    result = subprocess.run(
        [sys.executable, "-m", "gradtrace.cli", "train"], cwd=folder, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (folder / "output.txt").write_text(result.stdout)
    return folder


def curve(run_dir: Path) -> list[float]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record["critic/rewards/mean"] for record in records if "critic/rewards/mean" in record]


@pytest.mark.slow
def test_reward_rises_past_85_percent(demo: Path) -> None:
    rewards = curve(demo / "runs/demo")
    assert 0.1 <= sum(rewards[:3]) / 3 <= 0.5, "the warm start should leave much to learn, and something to start from"
    assert sum(rewards[-10:]) / 10 >= 0.85, rewards


@pytest.mark.slow
def test_held_out_prompts_are_solved_too(demo: Path) -> None:
    records = [json.loads(line) for line in (demo / "runs/demo/metrics.jsonl").read_text().splitlines()]
    found = [
        record[name] for record in records for name in record if name.startswith("val-core/arithmetic/reward/mean")
    ]
    assert found[0] <= 0.5 and found[-1] >= 0.85


@pytest.mark.slow
def test_traces_and_output_are_there(demo: Path) -> None:
    run = open_run(demo / "runs/demo")
    steps = len(curve(demo / "runs/demo"))
    assert run.steps("influence_trace") == run.steps("entropy_trace") == list(range(1, steps + 1))
    assert run.problems == []
    output = (demo / "output.txt").read_text()
    assert "mean reward, steps 1–" in output and "gradtrace view runs/demo" in output and "│" in output


@pytest.mark.slow
def test_policy_is_a_plain_transformers_folder_that_solves_the_task(demo: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo / "runs/demo/policy")
    tokenizer = AutoTokenizer.from_pretrained(demo / "runs/demo/policy")
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    prompts = ArithmeticTask(ArithmeticConfig(), seed=99).validation_prompts(64)
    texts = [prompt.item["prompt"] for prompt in prompts]
    inputs = tokenizer(texts, return_tensors="pt", return_token_type_ids=False)
    generated = model.generate(**inputs, max_new_tokens=20, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    answers = tokenizer.batch_decode(generated, skip_special_tokens=True)
    right = sum(answer == prompt.item["expected"] for answer, prompt in zip(answers, prompts, strict=True))
    assert right >= 0.85 * 64


@pytest.mark.slow
def test_same_seed_gives_the_same_curve(demo: Path) -> None:
    """A second demo starts from the cached warm start and repeats the first one's beginning."""
    again = subprocess.run(
        [sys.executable, "-m", "gradtrace.cli", "train", "trainer.total_steps=5"],
        cwd=demo,
        capture_output=True,
        text=True,
    )
    assert again.returncode == 0 and "warm start" not in again.stdout
    assert curve(demo / "runs/demo_2") == curve(demo / "runs/demo")[:5]


def first_after_a_checkpoint(resampler: Resampler) -> int:
    """A step whose responses were written by weights that are still there: old checkpoints are forgotten."""
    return int(resampler.weights[0].step or 0) + 1


@pytest.mark.slow
def test_delta_v_agrees_with_the_exact_value(demo: Path) -> None:
    """One text alone is right, so V of a prefix is the probability of the rest of it, or 0. The right responses are
    left out, or nothing would have to be sampled."""
    resampler = Resampler(demo / "runs/demo")
    checked = 0
    within = []
    step = first_after_a_checkpoint(resampler)
    for index in range(24):
        source = resampler.group(step, index)
        continuations = resampler.continuations(step, source)
        item = ArithmeticTask(ArithmeticConfig()).find(source.prompt)
        assert item is not None
        expected = [*ArithmeticTask.encode(item["expected"]), STOP]
        log_probs = continuations.log_probs(source.prompt, expected)
        wrong = [response for response in source.responses if response != expected]
        if not wrong:
            continue

        def exact(prefix: list[int], right: list[int] = expected, log_probs: np.ndarray = log_probs) -> float:
            return float(np.exp(log_probs[len(prefix) :].sum())) if prefix == right[: len(prefix)] else 0.0

        group = continuations.begin(source.prompt, wrong)
        group.measure(np.ones(len(group.tree), bool))
        continuations.run(group, 16)
        for response, result in zip(wrong, results(group), strict=True):
            truth = np.array([exact(response[:t]) for t in range(len(response) + 1)])
            within += (abs(result.delta_v - np.diff(truth)) <= 3 * result.stderr + 1e-4).tolist()
            checked += int((np.abs(np.diff(truth)) > 0.05).sum())
    assert checked >= 10 and np.mean(within) >= 0.95


@pytest.mark.slow
def test_resample_from_here_in_the_browser(demo: Path, tmp_path: Path) -> None:
    """On a copy of the run, whose checkpoint is the demo's own."""
    run_dir = Path(
        shutil.copytree(demo / "runs/demo", tmp_path / "demo", ignore=shutil.ignore_patterns("counterfactual"))
    )
    step = first_after_a_checkpoint(Resampler(run_dir))
    source = Resampler(run_dir).group(step)
    position = min(8, len(source.responses[0]) - 1)
    with serving([run_dir], sampling=LiveSampling([run_dir])) as origin, chromium() as browser:
        watched = Watched(browser.new_page(), origin)
        page = watched.open(f"#/group?step={step}&group={source.index}&right=delta_v&sel=0.{position}")
        page.wait_for_selector(".following")
        assert "Not measured here yet" in page.inner_text(".following")
        assert page.query_selector(".value-curve") is None
        page.select_option(".resample-controls select", "32")
        page.click("button.resample")
        page.wait_for_selector(".following .answer")
        assert f"continuations from step_{step - 1:06d}" in page.inner_text(".following")
        assert page.locator(".following .side-of").count() == 2
        shares = [float(text.rstrip(" %")) for text in page.locator(".side-of:first-child .percent").all_inner_texts()]
        assert 99 < sum(shares) < 101
        assert page.locator(".value-curve").count() == len(source.responses)
        page.wait_for_selector(".dock dt:has-text('ΔV')")
        page.click(".answer summary")
        assert page.locator(".answer[open] .text").count() > 0
        assert watched.errors == [] and watched.foreign_requests == []
    (stored,) = stored_groups(run_dir, step)
    assert len(stored.measurement.samples) >= 32
