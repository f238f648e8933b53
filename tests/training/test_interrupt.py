"""Ctrl-C finishes the step and saves; a second one stops at once."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradtrace.training.checkpoint import Checkpoints
from gradtrace.training.run import train
from tests.training import small
from tests.training.small import config, metrics, overrides

SLOW_REWARD = """
import time
def slow(response, item):
    time.sleep({seconds})
    return response.count("1") + 0.1 * len(response)
"""


def start(folder: Path, seconds: float, *more: str) -> subprocess.Popen[str]:
    """A run in a process of its own, returned when it has made two steps."""
    arguments = overrides(folder, "trainer.total_steps=1000", "trainer.validation.every=0", *more)
    (folder / "slow.py").write_text(SLOW_REWARD.format(seconds=seconds))
    arguments.append(f"reward.path={folder / 'slow.py'}:slow")
    process = subprocess.Popen(
        [sys.executable, "-m", "gradtrace.cli", "train", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    log = folder / "runs/demo/metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and log.read_text().count("\n") >= 2):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_interrupt_saves_a_run_that_resumes(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, 0.001)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    run_dir = tmp_path / "runs/demo"
    assert process.returncode == 130, output
    assert f"gradtrace train resume={run_dir}" in output and "Traceback" not in output
    made = metrics(run_dir)[-1]["step"]
    latest = Checkpoints(run_dir).latest()
    assert latest is not None and latest.name == f"step_{made:06d}"
    resumed = small.resume(run_dir, f"trainer.total_steps={made + 2}")
    assert train(resumed).finished
    straight = train(
        config(tmp_path, "trainer.validation.every=0", f"trainer.total_steps={made + 2}", "trainer.name=straight")
    ).run_dir
    assert metrics(run_dir) == metrics(straight)


def test_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    process = start(tmp_path, 0.1)  # a step takes more than a second
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "Stopped at once" in output, output
    assert Checkpoints(tmp_path / "runs/demo").latest() is None
