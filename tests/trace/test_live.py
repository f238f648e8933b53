"""A run is read while another process writes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from trace_fakes import influence_columns

import gradtrace
from gradtrace.trace import reader
from gradtrace.trace.files import read_confined
from gradtrace.trace.run_files import RunFiles
from gradtrace.trace.writer import TraceWriter

WRITE_A_RUN = """
import sys; sys.path.insert(0, sys.argv[1])
import pytest
from trace_fakes import influence_columns
from gradtrace.trace.run_files import RunFiles
from gradtrace.trace.writer import TraceWriter
files = RunFiles(sys.argv[2])
with TraceWriter(sys.argv[2], "influence_trace") as writer:
    for step in range(1, 121):
        writer.write(step, influence_columns(step))
        files.log(step, {"loss": step})
        if step % 40 == 0:  # a resumed run, in the middle of our reading
            writer.truncate_after(step - 3)
            for again in range(step - 2, step + 1):
                writer.write(again, influence_columns(again))
                writer.write(again, influence_columns(again))
"""


def test_a_reader_of_a_live_run_sees_whole_steps_and_every_metric_once(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    process = subprocess.Popen([sys.executable, "-c", WRITE_A_RUN, here, str(tmp_path)])
    run = gradtrace.open_run(tmp_path)
    seen: set[int] = set()
    metrics: list[int] = []
    offset = 0
    while True:
        finished = process.poll() is not None
        for number in run.steps("influence_trace"):
            if number not in seen or number % 7 == 0:
                try:
                    step = run.step("influence_trace", number)
                except reader.StepUnreadableError as error:
                    assert "has no step" in str(error)  # it was truncated since we looked
                    continue
                assert step["optimizer_step"].tolist() == [number] * step.n_responses
                seen.add(number)
        records, offset = run.metrics(offset)
        metrics += [record["loss"] for record in records]
        if finished:
            break
    assert process.returncode == 0
    assert seen == set(range(1, 121))
    assert metrics == list(range(1, 121))
    assert run.problems == []


def test_a_step_replaced_between_the_looks_at_manifest_and_file_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TraceWriter(tmp_path, "influence_trace") as trace_writer:
        trace_writer.write(1, influence_columns(1))
        trace_writer.flush()
        replaced = []

        def racing(root: Path, name: str, **limits: int) -> bytes:
            if name.endswith(".npz") and not replaced:
                replaced.append(name)
                trace_writer.write(1, influence_columns(11))
                trace_writer.flush()
            return read_confined(root, name, **limits)

        monkeypatch.setattr(reader, "read_confined", racing)
        run = gradtrace.open_run(tmp_path)
        assert run.step("influence_trace", 1)["optimizer_step"][0] == 11
        assert replaced
        assert run.problems == []


def test_metrics_cut_by_a_resume_are_read_anew(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    for step in range(1, 6):
        files.log(step, {"loss": step})
    run = gradtrace.open_run(tmp_path)
    _, offset = run.metrics()
    files.truncate_after(3)
    records, shorter = run.metrics(offset)
    assert [record["step"] for record in records] == [1, 2, 3]
    for step in range(4, 9):
        files.log(step, {"loss": step * 1000000000})
    records, _ = run.metrics(shorter)
    assert [record["step"] for record in records] == [4, 5, 6, 7, 8]
    records, _ = run.metrics(offset)  # in the middle of a line now
    assert [record["step"] for record in records] == list(range(1, 9))
    assert run.problems == []


def test_metrics_of_foreign_origin_are_read_and_a_torn_tail_waits(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n{"step": 2}\n{"st')
    records, offset = gradtrace.open_run(tmp_path).metrics()
    assert [record["step"] for record in records] == [1, 2]
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('ep": 3}\n')
    assert gradtrace.open_run(tmp_path).metrics(offset)[0] == [{"step": 3}]


def test_a_run_without_anything_is_empty(tmp_path: Path) -> None:
    run = gradtrace.open_run(tmp_path)
    assert (run.kinds(), run.metrics(), run.config, run.summary, run.token_bytes) == (
        [],
        ([], 0),
        {},
        {},
        None,
    )
    assert run.steps("tracin") == []
    assert run.verify() == []


def test_reading_the_manifest_again_costs_only_what_is_new(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, "influence_trace") as trace_writer:
        for step in range(30):
            trace_writer.write(step, influence_columns(step))
        trace_writer.flush()
        run = gradtrace.open_run(tmp_path)
        first = run.entries("influence_trace")
        trace_writer.write(30, influence_columns(30))
        trace_writer.flush()
        second = run.entries("influence_trace")
    assert list(second) == list(range(31))
    assert all(second[step] is first[step] for step in first)
