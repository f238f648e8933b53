"""A checkpoint is complete or absent, whatever happens while it is written."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from pathlib import Path

import pytest

from gradtrace import open_run
from gradtrace.config.loader import load_config
from gradtrace.errors import GradtraceError
from gradtrace.trace.files import seal
from gradtrace.training import run
from gradtrace.training.checkpoint import Checkpoints
from gradtrace.training.loop import Trainer
from tests.training import small
from tests.training.small import config, metrics, overrides

CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "os.truncate")


def train_and_die(arguments: list[str], point: int) -> None:
    """In a forked process: train, and die by SIGKILL at file operation `point` of the checkpoint of step 4."""
    countdown: int | None = None

    def die_in_time(event: str, args: tuple[object, ...]) -> None:
        nonlocal countdown
        writes = event == "open" and isinstance(args[2], int) and bool(args[2] & (os.O_WRONLY | os.O_RDWR))
        if countdown is None or not (writes or event in CHANGES):
            return
        if countdown == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        countdown -= 1

    class DyingTrainer(Trainer):
        def save(self, step: int) -> Path:
            nonlocal countdown
            countdown = point if step == 4 else None
            path = super().save(step)
            countdown = None
            return path

    sys.addaudithook(die_in_time)
    run.Trainer = DyingTrainer  # type: ignore[misc]
    run.train(load_config(arguments))


def fill(folder: Path, text: str = "content") -> None:
    (folder / "inner").mkdir()
    (folder / "inner/file.txt").write_text(text)


def test_latest_moves_after_the_folder_and_old_ones_go(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    for step in (1, 2, 3):
        checkpoints.save(step, fill)
    assert checkpoints.latest() == tmp_path / "checkpoints/step_000003"
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "latest",
        "step_000002",
        "step_000003",
    ]


def test_failed_save_leaves_the_previous_checkpoint_and_no_rest(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, fill)

    def full_disk(folder: Path) -> None:
        fill(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(GradtraceError, match=r"the disk is full.*step_000001, is untouched.*resume="):
        checkpoints.save(2, full_disk)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_000001"]
    assert checkpoints.latest() is not None


def test_a_full_disk_after_a_damaged_checkpoint_is_told(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    (checkpoints.save(1, fill) / "inner/file.txt").unlink()

    def cannot(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(GradtraceError, match=r"the disk is full\. There is no earlier checkpoint"):
        checkpoints.save(2, cannot)


@pytest.mark.parametrize("damage", ["truncate", "delete", "marker"])
def test_damaged_checkpoint_is_refused(tmp_path: Path, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    folder = checkpoints.save(1, fill)
    if damage == "truncate":
        os.truncate(folder / "inner/file.txt", 3)
    elif damage == "delete":
        (folder / "inner/file.txt").unlink()
    else:
        (folder / "complete.json").write_text("{}")
    with pytest.raises(GradtraceError, match="step_000001"):
        checkpoints.latest()


def test_folder_that_latest_never_reached_is_removed_on_resume(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, fill)
    checkpoints.save(2, fill)
    (tmp_path / "checkpoints/latest").write_text("step_000001\n")
    (tmp_path / "checkpoints/.step_000003.77.tmp").mkdir()
    checkpoints.discard_unfinished()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_000001"]


def test_disk_that_fills_up_while_saving_costs_one_checkpoint(tmp_path: Path) -> None:
    """Writes beyond a size limit fail in the middle of a file, as on a full disk, from the second checkpoint on."""

    class SmallDiskTrainer(Trainer):
        def save(self, step: int) -> Path:
            if step == 4:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
            return super().save(step)

    settings = ("trainer.total_steps=5", "trainer.checkpoint.every=2", "trainer.validation.every=0")
    process = os.fork()
    if process == 0:
        run.Trainer = SmallDiskTrainer  # type: ignore[misc]
        try:
            run.train(load_config(overrides(tmp_path, *settings)))
        except GradtraceError as error:
            told = "could not be saved" in str(error) and "step_000002, is untouched" in str(error)
            os._exit(7 if told else 1)
        os._exit(0)
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    folder = tmp_path / "runs/demo"
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["latest", "step_000002"]
    straight = run.train(config(tmp_path, *settings, "trainer.name=straight")).run_dir
    run.train(small.resume(folder))
    assert metrics(folder) == metrics(straight)


@pytest.mark.slow
def test_kill_at_any_file_operation_leaves_a_loadable_checkpoint(tmp_path: Path) -> None:
    """SIGKILL all over the second checkpoint; then the run resumes to the same end as the straight one."""
    settings = (
        "trainer.total_steps=5",
        "trainer.checkpoint.every=2",
        "trainer.checkpoint.keep_last=1",  # so that the older one is being deleted at some point
        "trainer.validation.every=0",
    )
    straight = run.train(config(tmp_path, *settings)).run_dir
    latest_names = []
    for point in range(0, 100, 2):
        name = f"killed_{point}"
        process = os.fork()
        if process == 0:  # a fork, because importing torch anew for every point would take minutes
            with contextlib.suppress(BaseException):
                train_and_die(overrides(tmp_path, *settings, f"trainer.name={name}"), point)
                os._exit(0)
            os._exit(1)
        _, status = os.waitpid(process, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        run_dir = tmp_path / "runs" / name
        latest = Checkpoints(run_dir).latest()
        assert latest is not None
        latest_names.append(latest.name)
        run.train(small.resume(run_dir))
        assert metrics(run_dir) == metrics(straight)
    assert len(latest_names) >= 8, "the checkpoint made fewer file operations than expected: is it still caught?"
    assert latest_names[0] == "step_000002" and latest_names[-1] == "step_000004"


def flip(path: Path) -> None:
    """One bit, in the middle of the file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["policy/model.safetensors", "optimizer.safetensors", "rng.safetensors"])
def test_flipped_bit_is_named_and_the_last_good_checkpoint_offered(tmp_path: Path, name: str) -> None:
    run_dir = run.train(config(tmp_path, "trainer.checkpoint.every=2")).run_dir
    straight = metrics(run_dir)
    good, broken = (run_dir / "checkpoints" / f"step_00000{step}" for step in (2, 4))
    flip(broken / name)
    with pytest.raises(GradtraceError) as error:
        run.train(small.resume(run_dir, "trainer.total_steps=5"))
    for words in (f"{broken} is damaged: {name} does not have the bytes", f"resume={good}"):
        assert words in str(error.value)
    reward = f"reward.path={tmp_path / 'reward.py'}:count_ones"
    again = run.train(load_config([f"resume={good}", reward, "trainer.total_steps=4"]))
    assert again.run_dir == run_dir and again.finished and metrics(run_dir) == straight
    assert Checkpoints(run_dir).latest() == broken  # made again


def test_checkpoints_of_earlier_versions_are_checked_by_size(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    folder = checkpoints.save(1, fill)
    (folder / "complete.json").write_bytes(seal({"files": {"inner/file.txt": len("content")}}))
    assert checkpoints.latest() == folder
    (folder / "inner/file.txt").write_text("less")
    with pytest.raises(GradtraceError, match=r"7 bytes and has 4\. There is no other checkpoint"):
        checkpoints.latest()


def checkpoint_of(path: Path) -> Path:
    return open_run(path).checkpoint(resumable=True).folder


def test_commands_take_the_latest_checkpoint_of_a_run_and_list_what_there_is(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run")
    with pytest.raises(GradtraceError, match=r"no checkpoint and no run with one: .* has no runs"):
        checkpoint_of(tmp_path / "run")
    folders = [checkpoints.save(step, fill) for step in (2, 4)]
    assert checkpoint_of(tmp_path / "run") == folders[1]
    assert checkpoint_of(folders[0]) == folders[0]
    with pytest.raises(GradtraceError, match=r"checkpoints has step_000002, step_000004\."):
        checkpoint_of(tmp_path / "run" / "checkpoints" / "step_000003")
