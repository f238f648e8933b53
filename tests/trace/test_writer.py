"""What is written can be read back exactly; what is wrong is named; what fails is counted and not silent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trace_fakes import entropy_columns, influence_columns

import gradtrace
from gradtrace.errors import GradtraceError
from gradtrace.instruments.influence import INFLUENCE_TRACE
from gradtrace.trace import files, writer
from gradtrace.trace.columns import COLUMNS, FORMAT_VERSION, KINDS, GroupStatus, Selection
from gradtrace.trace.writer import TraceWriter

KIND = INFLUENCE_TRACE


def write(run: Path, steps: dict[int, dict[str, Any]], kind: str = KIND, **options: Any) -> TraceWriter:
    with TraceWriter(run, kind, on_error="raise", **options) as trace_writer:
        for step, columns in steps.items():
            trace_writer.write(step, columns, {"task": "arithmetic"})
    return trace_writer


def test_every_column_comes_back_exactly(tmp_path: Path) -> None:
    columns = influence_columns(3, pairwise=True)
    write(tmp_path, {7: columns})
    step = gradtrace.open_run(tmp_path).step(KIND, 7)
    assert set(step.columns) == {*columns, "token_offsets"}
    for name, values in columns.items():
        expected = np.asarray(values).astype(COLUMNS[name].dtype)
        assert np.array_equal(step[name], expected), name
        assert step[name].dtype == expected.dtype, name
    assert step.meta == {"step": 7, "task": "arithmetic"}


def test_group_response_tokens_and_pairwise_are_cut_from_the_columns(tmp_path: Path) -> None:
    columns = influence_columns(1, pairwise=True)
    write(tmp_path, {1: columns})
    step = gradtrace.open_run(tmp_path).step(KIND, 1)
    group = step.group(1)
    assert group.group_id == 10
    assert group.prompt_ids.tolist() == [0, 1, 2, 3]
    assert group.expected_ids is not None
    assert group.expected_ids.tolist() == [7, 8]
    assert group.responses == [3, 4, 5]
    response = step.response(4)
    assert (response.group, response.row, response.reward, response.accepted) == (1, 104, 0.0, False)
    assert response.selection is Selection.SELECTED
    start = int(columns["length"][:4].sum())
    stop = start + response.length
    assert step.tokens(4)["entropy"].tolist() == columns["entropy"][start:stop].astype(np.float32).tolist()
    pairwise = step.pairwise(4)
    assert pairwise is not None
    assert pairwise.members.tolist() == [3, 4, 5]
    block = columns["pairwise"][3 * start : 3 * stop].astype(np.float32).reshape(-1, 3)
    assert np.array_equal(pairwise.scores, block)
    skipped = step.group(2)
    assert skipped.status is GroupStatus.CONSTANT_REWARD
    assert skipped.responses == []


def test_files_are_plain_npz_that_numpy_reads_without_pickle(tmp_path: Path) -> None:
    write(tmp_path, {1: influence_columns(pairwise=True)})
    with np.load(tmp_path / KIND / "steps" / "step_000001.npz", allow_pickle=False) as arrays:
        assert arrays["format_version"].tolist() == [FORMAT_VERSION]
        assert json.loads(arrays["meta_json"].tobytes())["step"] == 1
        assert all(arrays[name].ndim == 1 for name in arrays.files)
    assert (tmp_path / KIND / "latest_step.txt").read_text() == "1\n"
    assert json.loads((tmp_path / KIND / "summary.json").read_text())["latest_step"] == 1


def test_bytes_per_token_stay_under_24(tmp_path: Path) -> None:
    columns = influence_columns(groups=8, siblings=8, length=400)
    done = write(tmp_path, {1: columns})
    assert len(columns["token_id"]) > 10_000
    assert done.stats.bytes / len(columns["token_id"]) <= 24


def test_empty_step_is_written(tmp_path: Path) -> None:
    """Every group skipped: no response, and the reasons are in the file."""
    write(tmp_path, {1: influence_columns(groups=0)})
    step = gradtrace.open_run(tmp_path).step(KIND, 1)
    assert (step.n_groups, step.n_responses, step.n_tokens) == (1, 0, 0)
    assert step.group(0).status is GroupStatus.CONSTANT_REWARD


def test_caller_may_reuse_its_buffers(tmp_path: Path) -> None:
    columns = {name: np.array(values) for name, values in influence_columns().items()}
    before = columns["entropy"].astype(np.float32)
    with TraceWriter(tmp_path, KIND) as trace_writer:
        trace_writer.write(1, columns)
        columns["entropy"][:] = -1
    assert np.array_equal(gradtrace.open_run(tmp_path).step(KIND, 1)["entropy"], before)


def test_torch_tensors_and_numpy_numbers_are_taken(tmp_path: Path) -> None:
    columns = {name: torch.as_tensor(np.asarray(values)) for name, values in influence_columns().items()}
    with TraceWriter(tmp_path, KIND, on_error="raise") as trace_writer:
        trace_writer.write(1, columns, {"temperature": np.float32(0.5), "scale": torch.tensor(2)})
    step = gradtrace.open_run(tmp_path).step(KIND, 1)
    assert step["reward"].tolist() == columns["reward"].tolist()
    assert step.meta == {"step": 1, "temperature": 0.5, "scale": 2}


def _without(name: str) -> Any:
    def change(columns: dict[str, Any]) -> None:
        del columns[name]

    return change


def _set(name: str, value: Any) -> Any:
    def change(columns: dict[str, Any]) -> None:
        columns[name] = value(columns.get(name))

    return change


@pytest.mark.parametrize(
    ("change", "column"),
    [
        (_without("token_id"), "token_id"),
        (_without("expected_offsets"), "expected_ids"),
        (_set("entropy", lambda values: values[:-1]), "entropy"),
        (_set("reward", lambda values: values[:-1]), "reward"),
        (_set("prompt_offsets", lambda values: values[:-1]), "prompt_offsets"),
        (_set("prompt_offsets", lambda values: values[::-1]), "prompt_offsets"),
        (_set("group_status", lambda values: [99] * len(values)), "group_status"),
        (_set("group", lambda values: values + 2), "group"),
        (_set("group", lambda values: values - 1), "group"),
        (_set("token_id", lambda values: values + 0.5), "token_id"),
        (_set("token_id", lambda values: values + 2**40), "token_id"),
        (_set("token_id", lambda values: values.reshape(1, -1)), "token_id"),
        (_set("pairwise", lambda values: values[:-1]), "pairwise"),
        (_set("pairwise_member", lambda values: values + 100), "pairwise_member"),
        (_without("pairwise_member"), "pairwise_member"),
        (_set("reward", lambda values: torch.ones(len(values), requires_grad=True)), "reward"),
        (_set("reward", lambda values: torch.ones(len(values), dtype=torch.bfloat16)), "reward"),
        (_set("prompt_ids", lambda values: [[1], [2, 3]]), "prompt_ids"),
        (_set("entropies", lambda values: [0.5]), "entropies"),
    ],
)
def test_a_column_that_does_not_fit_is_named(change: Any, column: str, tmp_path: Path) -> None:
    columns = influence_columns(pairwise=True)
    change(columns)
    with pytest.raises(GradtraceError, match=f"column '{column}'"):
        write(tmp_path, {1: columns})
    assert gradtrace.open_run(tmp_path).steps(KIND) == []


def test_an_unknown_column_gets_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(GradtraceError, match="did you mean 'entropy'"):
        write(tmp_path, {1: {**influence_columns(), "entropi": [0.0]}})


def test_an_influence_trace_without_any_influence_is_refused(tmp_path: Path) -> None:
    columns = influence_columns()
    del columns["influence"]
    with pytest.raises(GradtraceError, match="influence, influence_loss_term, influence_position"):
        write(tmp_path, {1: columns})


def test_warn_reports_bad_columns_and_goes_on(tmp_path: Path) -> None:
    reports: list[str] = []
    with TraceWriter(tmp_path, KIND, on_error="warn", on_report=reports.append) as trace_writer:
        trace_writer.write(1, {**influence_columns(), "entropy": [0.0]})
        trace_writer.write(2, influence_columns(), {"unwritable": object()})
        trace_writer.write(3, influence_columns())
    assert gradtrace.open_run(tmp_path).steps(KIND) == [3]
    assert (trace_writer.stats.written, trace_writer.stats.failed) == (1, 2)
    assert "'entropy'" in reports[0]
    assert "step 2" in reports[1]


def test_a_report_that_fails_does_not_stop_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(message: str) -> None:
        raise RuntimeError("the logger is gone")

    _fail_on(monkeypatch, [1])
    with TraceWriter(tmp_path, KIND, queue_size=1, on_report=broken) as trace_writer:
        for step in (1, 2, 3, 4):
            trace_writer.write(step, influence_columns(step))
    assert gradtrace.open_run(tmp_path).steps(KIND) == [2, 3, 4]
    assert "the logger is gone" in caplog.text


def test_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    write(tmp_path, {1: influence_columns(1), 2: influence_columns(2)})
    write(tmp_path, {1: influence_columns(11)})
    run = gradtrace.open_run(tmp_path)
    assert run.steps(KIND) == [1, 2]
    assert run.step(KIND, 1)["optimizer_step"][0] == 11
    assert len(list((tmp_path / KIND / "steps").iterdir())) == 2
    assert run.problems == []


def test_a_resumed_run_leaves_the_files_of_an_uninterrupted_one(tmp_path: Path) -> None:
    steps = {step: influence_columns(step) for step in range(1, 6)}
    write(tmp_path / "whole", steps)
    write(tmp_path / "resumed", {**steps, 4: influence_columns(44), 5: influence_columns(55)})
    with TraceWriter(tmp_path / "resumed", KIND) as trace_writer:
        trace_writer.truncate_after(3)
        assert gradtrace.open_run(tmp_path / "resumed").steps(KIND) == [1, 2, 3]
        for step in (4, 5):
            trace_writer.write(step, steps[step], {"task": "arithmetic"})

    def content(run: Path) -> dict[str, bytes]:
        files = {path.name: path.read_bytes() for path in (run / KIND).rglob("*") if path.is_file()}
        lines = [json.loads(line) for line in files.pop("manifest.jsonl").splitlines()]
        stable = [{key: value for key, value in line.items() if key not in ("time", "check")} for line in lines]
        return {**files, "manifest": json.dumps(stable).encode()}

    assert content(tmp_path / "whole") == content(tmp_path / "resumed")


class _SlowDisk:
    """`atomic_write` that waits until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started = threading.Semaphore(0)
        self.let_go = threading.Semaphore(0)
        monkeypatch.setattr(writer, "atomic_write", self)

    def __call__(self, path: Path, data: bytes, fsync: bool = False) -> None:
        if path.suffix == ".npz":
            self.started.release()
            assert self.let_go.acquire(timeout=60)
        files.atomic_write(path, data, fsync)


def test_a_slow_disk_blocks_only_when_the_queue_is_full_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = _SlowDisk(monkeypatch)
    reports: list[str] = []
    trace_writer = TraceWriter(tmp_path, KIND, queue_size=2, on_report=reports.append)
    trace_writer.write(1, influence_columns(1))
    assert disk.started.acquire(timeout=60)  # step 1 is being written, the queue is empty
    trace_writer.write(2, influence_columns(2))
    trace_writer.write(3, influence_columns(3))
    assert trace_writer.stats.blocked_writes == 0
    blocked = threading.Thread(target=trace_writer.write, args=(4, influence_columns(4)))
    blocked.start()
    blocked.join(timeout=0.2)
    assert blocked.is_alive(), "the queue holds two steps, a third must wait"
    assert reports == []
    for _ in range(4):
        disk.let_go.release()
    blocked.join(timeout=60)
    trace_writer.close()
    assert gradtrace.open_run(tmp_path).steps(KIND) == [1, 2, 3, 4]
    assert trace_writer.stats.blocked_writes == 1
    assert trace_writer.stats.blocked_seconds > 0
    assert "step 4 waited" in reports[0]


def _fail_on(monkeypatch: pytest.MonkeyPatch, fails: list[int]) -> None:
    """Step files of these steps meet a full disk."""

    def failing(path: Path, data: bytes, fsync: bool = False) -> None:
        if any(path.name == f"step_{step:06d}.npz" for step in fails):
            raise OSError(28, "No space left on device")
        files.atomic_write(path, data, fsync)

    monkeypatch.setattr(writer, "atomic_write", failing)


def test_a_write_error_is_counted_and_shown_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _fail_on(monkeypatch, [2])
    with TraceWriter(tmp_path, KIND, on_error="warn") as trace_writer:
        for step in (1, 2, 3):
            trace_writer.write(step, influence_columns(step))
    assert (trace_writer.stats.written, trace_writer.stats.failed) == (2, 1)
    assert "step 2" in trace_writer.stats.last_error
    assert "No space left" in caplog.text
    assert gradtrace.open_run(tmp_path).steps(KIND) == [1, 3]


@pytest.mark.parametrize("at", ["write", "flush", "close"])
def test_a_write_error_raises_at_the_next_call_if_asked(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fail_on(monkeypatch, [1])
    trace_writer = TraceWriter(tmp_path, KIND, on_error="raise")
    trace_writer.write(1, influence_columns())
    if at == "write":
        trace_writer._queue.join()
    calls = {
        "write": lambda: trace_writer.write(2, influence_columns()),
        "flush": trace_writer.flush,
        "close": trace_writer.close,
    }
    with pytest.raises(GradtraceError, match="No space left"):
        calls[at]()
    trace_writer.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root can mount a small disk; test_crash.py has the injected version")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_really_full_disk_keeps_what_fits(small_disk: Path) -> None:
    with TraceWriter(small_disk, KIND) as trace_writer:
        for step in range(1, 30):
            trace_writer.write(step, influence_columns(step, groups=3, length=40))
    run = gradtrace.open_run(small_disk)
    readable = [step.step for step in run.readable_steps(KIND)]
    assert trace_writer.stats.failed > 0
    assert len(readable) == trace_writer.stats.written > 0
    assert run.problems == []
    assert not list(small_disk.rglob("*.tmp"))


def test_a_script_that_forgets_to_close_keeps_its_last_steps(tmp_path: Path) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from trace_fakes import entropy_columns; import gradtrace\n"
        "writer = gradtrace.TraceWriter(sys.argv[2], 'entropy_trace')\n"
        "for step in range(20): writer.write(step, entropy_columns(step))\n"
    )
    here = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", script, here, str(tmp_path)], check=True)
    assert gradtrace.open_run(tmp_path).steps("entropy_trace") == list(range(20))


def test_importing_gradtrace_is_light() -> None:
    code = "import sys, gradtrace; heavy = {'numpy', 'torch', 'yaml'} & set(sys.modules); sys.exit(bool(heavy))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_reading_and_writing_traces_does_not_import_torch() -> None:
    code = "import sys, gradtrace; gradtrace.open_run, gradtrace.TraceWriter; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_names_known_columns_and_can_be_written(kind: str, tmp_path: Path) -> None:
    spec = KINDS[kind]
    assert set(spec.columns) <= set(COLUMNS)
    assert all(COLUMNS[name].meaning for name in spec.columns)
    source = influence_columns(pairwise=True)
    responses = len(source["group"])
    source |= {name: np.zeros(responses) for name in ("score", "share", "grad_share", "grad_norm")}
    source |= dict.fromkeys(("token_grad_share", "push"), source["entropy"])
    source |= {name: np.zeros(responses, np.uint8) for name in ("reason", "batch")}
    source |= {"kept": np.ones(responses, bool), "entropy_change": source["entropy"]}
    own = [column for column in spec.brings if column.name not in source and column.name in spec.required]
    sizes = {"group": len(source["group_id"]), "token": len(source["token_id"])}
    source |= {c.name: np.zeros(sizes.get(c.level, 0) + c.is_offsets, c.dtype) for c in own}
    columns = {name: source[name] for name in spec.columns if name in source}
    write(tmp_path, {1: columns}, kind)
    step = gradtrace.open_run(tmp_path).step(kind, 1)
    assert step.response(0).length == len(step.tokens(0)["token_id"])
    assert len(step.to_pandas()) == step.to_arrow().num_rows == step.n_tokens


def test_unwritable_folder_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / KIND).write_text("a file where the folder should be")
    with pytest.raises(GradtraceError, match=KIND):
        TraceWriter(tmp_path, KIND)


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    write(tmp_path, {1: entropy_columns()}, "entropy_trace")
    leftover = tmp_path / "entropy_trace" / "steps" / f".step_000002.npz.1{files.TEMPORARY}"
    leftover.write_bytes(b"half")
    write(tmp_path, {2: entropy_columns()}, "entropy_trace")
    assert not leftover.exists()
    assert os.listdir(tmp_path / "entropy_trace" / "steps") != []


def test_runs_list_instruments_in_the_order_of_a_step() -> None:
    assert list(KINDS) == [
        "entropy_trace",
        "influence_trace",
        "tracin",
        "entropy_probe",
        "blame",
        "counterfactual",
    ]
