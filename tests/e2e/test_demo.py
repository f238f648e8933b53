"""The demo as a newcomer runs it: `gradtrace train` without arguments learns the task, and its traces can be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradtrace import open_run
from gradtrace.cli import main


@pytest.mark.slow
def test_the_demo_learns_past_85_percent(tmp_path: Path) -> None:
    assert main(["train", f"trainer.runs_dir={tmp_path / 'runs'}"]) == 0
    run_dir = tmp_path / "runs" / "demo"
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["critic/rewards/mean"] for line in lines if "critic/rewards/mean" in line]
    assert len(rewards) == 80
    assert 0.1 < sum(rewards[:3]) / 3 < 0.5
    assert sum(rewards[-5:]) / 5 > 0.85

    run = open_run(run_dir)
    assert run.steps("influence_trace") == run.steps("entropy_trace") == list(range(1, 81))
    assert run.problems == []
    parameters = json.loads((run_dir / "summary.json").read_text())["parameters"]
    assert parameters < 1_000_000

    # In rejected answers of an early step the first wrong token is far more often the most negative one than by chance.
    step = run.step("influence_trace", 3)
    hits = []
    for r in range(step.n_responses):
        wrong = int(step["first_wrong"][r])
        if wrong >= 0 and not step["accepted"][r]:
            hits.append(int(step.tokens(r)["influence_position"].argmin()) == wrong)
    assert len(hits) > 20 and sum(hits) / len(hits) > 0.4
