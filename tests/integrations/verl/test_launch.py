"""What the launcher does when verl ends: finished, restarted, or given up, each with a sentence. (test_run.py has the
real deaths; here verl's process is replaced by one that writes the state it would have left.)"""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from gradtrace.config.loader import load_config
from gradtrace.config.root import Config
from gradtrace.errors import GradtraceError
from gradtrace.integrations.verl.driver.watch import Status
from gradtrace.integrations.verl.launch import job as launch
from gradtrace.integrations.verl.launch.translate import Translation
from gradtrace.training.terminal import PlainDisplay, SilentDisplay

DEATH = Status(4, "update", "actor rank 1", "ActorDiedError", {"actor rank 1": 42})


class Recorded(SilentDisplay):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


def run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, attempts: list[Status | int], max_failures: int = 2
) -> tuple[bool, list[str]]:
    """Attempts of verl: a state that it leaves behind with exit code 1, or an exit code alone."""
    left = iter(attempts)

    def attempt(translation: Translation, run_dir: Path, display: object) -> int:
        found = next(left)
        if isinstance(found, Status):
            found.write(run_dir)
            return 1
        return found

    monkeypatch.setattr(launch, "run_once", attempt)
    config: Config = load_config(["engine=verl", "recipe=demo", f"cluster.max_failures={max_failures}"])
    display = Recorded()
    finished = launch.run_with_restarts(config, Translation({}, {}), folder, display)
    return finished, display.messages


def test_a_death_is_named_and_the_run_goes_on_from_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("3")
    finished, messages = run(tmp_path, monkeypatch, [DEATH, 0])
    assert finished and messages == [
        "actor rank 1 (process 42) died in phase update of step 4. "
        "Restart 1 of at most 2, from the checkpoint of step 3."
    ]
    assert messages[0] in (tmp_path / "verl.log").read_text()


def test_it_gives_up_after_max_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GradtraceError, match=r"failure 3, and cluster\.max_failures=2"):
        run(tmp_path, monkeypatch, [DEATH, DEATH, DEATH])


def test_what_cannot_start_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "verl.log").write_text("ValueError: no such model")
    with pytest.raises(GradtraceError, match=r"could not start(.|\n)*no such model"):
        run(tmp_path, monkeypatch, [1])


SLOW_START = """
import json, pathlib, sys, time
run = pathlib.Path(next(w for w in sys.argv if w.startswith("hydra.run.dir")).split("=", 1)[1]).parent
print("Started a local Ray instance.", flush=True)
time.sleep(0.8)
(run / "verl_status.json").write_text(json.dumps({"step": 1, "phase": "rollout", "workers": {"actor rank 0": 7}}))
time.sleep(0.8)
(run / "metrics.jsonl").write_text(json.dumps({"step": 1, "critic/rewards/mean": 0.5}) + "\\n")
time.sleep(0.5)
"""


def test_a_start_is_shown_from_the_first_moment_without_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is named before anything runs; then what the log says, the phases, and the steps."""
    (tmp_path / "verl" / "trainer").mkdir(parents=True)
    for name in ("verl/__init__.py", "verl/trainer/__init__.py"):
        (tmp_path / name).touch()
    (tmp_path / "verl" / "trainer" / "main_ppo.py").write_text(SLOW_START)
    monkeypatch.setattr(launch, "START_SECONDS", 0.1)
    output = io.StringIO()
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    translation = Translation({}, {"PYTHONPATH": str(tmp_path)})
    assert launch.run_once(translation, run_dir, PlainDisplay(Console(file=output, width=200))) == 0
    lines = output.getvalue().splitlines()
    assert lines[0].startswith("verl starts") and lines[0].endswith(str(run_dir / "verl.log"))
    ray, rollout, step = (
        next(i for i, line in enumerate(lines) if words in line)
        for words in ("s: Started a local Ray instance.", "s: step 1, rollout", "step 1/0  reward 0.500")
    )
    assert 0 < ray < rollout < step == len(lines) - 1
