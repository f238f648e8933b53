"""Where a run goes: its traces in a folder of the user's choice, its curves to W&B under names of the user's choice."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gradtrace import open_run
from gradtrace.cli import main
from gradtrace.errors import GradtraceError
from gradtrace.trace.run_files import OWNER, POINTER
from gradtrace.training.run import train
from gradtrace.viewer.catalog import RunCatalog, chosen_runs
from tests.training import small

TRACED = ("trainer.total_steps=2", "trainer.traces=true", "trainer.influence_trace.enable=true")
TRACED = (*TRACED, "trainer.entropy_trace.enable=true", "trainer.validation.every=0")


def run(folder: Path, *more: str) -> Path:
    return train(small.config(folder, *TRACED, f"trainer.trace_dir={folder / 'big disk'}", *more)).run_dir


def test_traces_elsewhere_are_found_by_every_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = run(tmp_path)
    traces = tmp_path / "big disk" / "demo"
    assert (traces / "influence_trace" / "manifest.jsonl").is_file()
    assert not (run_dir / "influence_trace").exists()
    opened = open_run(run_dir)
    assert opened.kinds() == ["entropy_trace", "influence_trace"] and opened.steps("influence_trace") == [
        1,
        2,
    ]
    assert opened.verify() == []
    for path in (run_dir, traces, traces / "influence_trace"):
        assert [found.resolve() for found in chosen_runs([str(path)], tmp_path)] == [run_dir.resolve()]
    served = RunCatalog([run_dir], None).get(0)
    assert served is not None and list(served.entries("influence_trace")) == [1, 2]
    assert main(["doctor", str(run_dir)]) == 0
    assert main(["report", str(run_dir), "-o", str(tmp_path / "report.html")]) == 0
    assert main(["trace", "show", str(run_dir), "--step", "1"]) == 0
    assert "no run" not in capsys.readouterr().err
    train(small.resume(run_dir, "trainer.total_steps=3"))
    assert open_run(run_dir).steps("influence_trace") == [1, 2, 3]
    with pytest.raises(GradtraceError, match="a run has one place for them"):
        train(small.resume(run_dir, "trainer.total_steps=4", "trainer.trace_dir=''"))


def test_a_run_cannot_point_a_reader_at_what_is_not_its_own(tmp_path: Path) -> None:
    run_dir = run(tmp_path)
    received = tmp_path / "received"
    shutil.copytree(run_dir, received)
    opened = open_run(received)
    assert opened.kinds() == [] and "does not name this run" in str(opened.problems[0])
    (tmp_path / "big disk" / "demo" / OWNER).write_text(f"{received.resolve()}\n")
    assert open_run(received).kinds() == ["entropy_trace", "influence_trace"]
    (received / POINTER).unlink()
    assert open_run(received).kinds() == []


def test_a_failed_start_leaves_no_folder_of_traces(tmp_path: Path) -> None:
    with pytest.raises(GradtraceError, match="matches none"):
        run(
            tmp_path,
            *(f"trainer.influence_trace.{knob}" for knob in ("credit=position", "module_name_filter=[nothing]")),
        )
    assert not (tmp_path / "big disk" / "demo").exists() and not (tmp_path / "runs" / "demo").exists()


def test_two_runs_of_one_name_do_not_share_a_folder(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(GradtraceError, match="holds the traces of"):
        run(tmp_path, f"trainer.runs_dir={tmp_path / 'other'}")


def test_wandb_has_project_name_group_and_one_id_for_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real package, offline."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    seen = []
    finish = wandb.finish

    def remember() -> None:
        run = wandb.run
        seen.append((run.project, run.name, run.group, run.id, run.step))
        finish()

    monkeypatch.setattr(wandb, "finish", remember)
    words = ("project=mine", "name=first", "group=seeds")
    config = small.config(
        tmp_path,
        *("trainer.total_steps=1", "trainer.validation.every=0", "trainer.logger=[wandb]"),
        *(f"trainer.wandb.{word}" for word in words),
    )
    run_dir = train(config).run_dir
    train(small.resume(run_dir, "trainer.total_steps=2"))
    (project, name, group, first, _), (*_, second, _) = seen
    assert (project, name, group) == ("mine", "first", "seeds")
    assert first == second == (run_dir / "wandb_id.txt").read_text().strip()
    train(small.resume(run_dir, "trainer.total_steps=3", "trainer.wandb.id=chosen"))
    assert seen[2][3] == "chosen"
