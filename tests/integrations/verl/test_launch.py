"""What the launcher does when verl ends: finished, restarted, or given up, each with a sentence. (test_run.py has the
real deaths; here verl's process is replaced by one that writes the state it would have left.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from gradtrace.config import Config
from gradtrace.config_loader import load_config
from gradtrace.errors import GradtraceError
from gradtrace.integrations.verl.driver.status import Status
from gradtrace.integrations.verl.launch import job as launch
from gradtrace.integrations.verl.launch.translate import Translation
from gradtrace.training.terminal import SilentDisplay

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
