"""A run has one writer, says who it is, and is alive exactly as long as that process; a failed start leaves nothing."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from gradtrace import open_run
from gradtrace.cli import main
from gradtrace.errors import GradtraceError
from gradtrace.trace.run_files import DRIVER_LOCK, LOCK, RunFiles, is_held, refuse_driver
from gradtrace.training.run import train
from gradtrace.viewer.catalog import state_of
from tests.training import small

HOLD = """
import sys, time
from gradtrace.trace.run_files import RunFiles
files = RunFiles(sys.argv[1], role=sys.argv[2])
files.log(1, {"critic/rewards/mean": 0.5})
print("ready", flush=True)
sys.stdin.read()
"""


def writer(run_dir: Path, role: str = LOCK) -> subprocess.Popen[str]:
    """Another process that writes the run until its standard input closes."""
    command = [sys.executable, "-c", HOLD, str(run_dir), role]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.communicate()


def test_second_trainer_of_a_run_is_told_who_has_it(tmp_path: Path) -> None:
    run_dir = train(small.config(tmp_path, "trainer.total_steps=1")).run_dir
    process = writer(run_dir)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    with pytest.raises(GradtraceError, match=rf"written by process {process.pid} on .*wait for it to end"):
        train(small.resume(run_dir, "trainer.total_steps=2"))
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before
    end(process)
    assert train(small.resume(run_dir, "trainer.total_steps=2")).finished


def test_driver_that_outlives_its_launcher_keeps_the_run(tmp_path: Path) -> None:
    process = writer(tmp_path / "run", DRIVER_LOCK)
    RunFiles(tmp_path / "run").close()  # another role: launcher and driver write at the same time
    with pytest.raises(GradtraceError, match=f"still being written by process {process.pid}"):
        refuse_driver(tmp_path / "run")
    end(process)
    refuse_driver(tmp_path / "run")


def test_live_means_that_a_process_holds_the_lock(tmp_path: Path) -> None:
    process = writer(tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert state_of(run) == "live"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert state_of(run) == "quiet"
    end(writer(tmp_path / "other"))
    assert state_of(open_run(tmp_path / "other")) == "finished"  # a loop that said nothing at its end


def test_loop_that_raised_did_not_finish(tmp_path: Path) -> None:
    code = HOLD.replace("sys.stdin.read()", "1 / 0")
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run"), LOCK], capture_output=True, check=False)
    assert open_run(tmp_path / "run").summary == {"steps": 1, "finished": False}
    with pytest.raises(ZeroDivisionError), RunFiles(tmp_path / "with") as files:
        files.log(3, {})
        raise ZeroDivisionError
    assert open_run(tmp_path / "with").summary == {"steps": 3, "finished": False}


def test_trainer_in_this_process_lets_go_at_its_end(tmp_path: Path) -> None:
    run_dir = train(small.config(tmp_path, "trainer.total_steps=1")).run_dir
    assert not is_held(run_dir) and state_of(open_run(run_dir)) == "finished"


@pytest.mark.parametrize(
    "override",
    [
        "trainer.influence_trace.module_name_filter=[no_such_layer]",
        "reward.path=no_such_file.py:f",
        "data.train=[no_such_file.jsonl]",
    ],
)
def test_failed_start_leaves_no_folder(tmp_path: Path, override: str) -> None:
    more = ["trainer.influence_trace.enable=true", override]
    if override.startswith("data"):
        model = train(small.config(tmp_path / "", "trainer.total_steps=1", "trainer.name=model")).run_dir / "policy"
        more += ["task.name=dataset", f"model.path={model}"]
    with pytest.raises(GradtraceError):
        train(small.config(tmp_path, *more))
    assert not (tmp_path / "runs" / "demo").exists()
    assert train(small.config(tmp_path, "trainer.total_steps=1")).run_dir.name == "demo"


def test_doctor_does_not_call_an_empty_folder_healthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("trainer: {total_steps: 3}\n")
    for kind in ("entropy_trace", "influence_trace"):
        (tmp_path / "run" / kind / "steps").mkdir(parents=True)
        (tmp_path / "run" / kind / "manifest.jsonl").touch()
    assert main(["doctor", str(tmp_path / "run")]) == 1
    shown = capsys.readouterr().out
    assert "live" not in shown and "healthy" not in shown and "never finished a step" in shown


def test_run_log_keeps_warnings_and_messages(tmp_path: Path) -> None:
    with RunFiles(tmp_path / "run") as files:
        logging.getLogger("gradtrace.tasks.somewhere").warning("a %s warning", "logged")
        told: list[str] = []
        files.messages.telling(told.append)("an instrument's message")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = files.messages._warned
            warnings.warn("a Python warning", stacklevel=1)
    logging.getLogger("gradtrace").warning("after the end")
    text = (tmp_path / "run" / "run.log").read_text()
    assert told == ["an instrument's message"]
    for words in ("warning: a logged warning", "an instrument's message", "UserWarning: a Python warning"):
        assert words in text
    assert "after the end" not in text


def test_logs_of_two_runs_close_in_any_order(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        shown: list[str] = []
        warnings.showwarning = lambda message, *others: shown.append(str(message))  # type: ignore[assignment]
        first, second = RunFiles(tmp_path / "first"), RunFiles(tmp_path / "second")
        warnings.warn("for both", stacklevel=1)
        first.close()
        warnings.warn("for one", stacklevel=1)
        second.close()
        warnings.warn("for none", stacklevel=1)
    assert shown == ["for both", "for one", "for none"]
    texts = [(tmp_path / name / "run.log").read_text() for name in ("first", "second")]
    assert ["for one" in text for text in texts] == [False, True]
    assert all("for both" in text and "for none" not in text for text in texts)
