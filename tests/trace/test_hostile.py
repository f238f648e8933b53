"""A run from elsewhere may lie: its files are refused before they run code, fill the memory or leave the run."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trace_fakes import influence_columns

import gradtrace
from gradtrace.instruments.influence import INFLUENCE_TRACE
from gradtrace.trace.columns import FORMAT_VERSION, conform
from gradtrace.trace.files import seal
from gradtrace.trace.reader import RunReader, StepUnreadableError
from gradtrace.trace.safe_npz import SafeNpz, UnsafeNpzError, dump_npz

KIND = INFLUENCE_TRACE


def step_arrays(**changes: Any) -> dict[str, np.ndarray]:
    columns = conform(KIND, influence_columns())
    head = {
        "format_version": np.array([FORMAT_VERSION], np.int32),
        "meta_json": np.frombuffer(b'{"step": 1}', np.uint8),
    }
    return {**head, **columns, **changes}


def forge(run: Path, data: bytes | None, file: str = "steps/step_000001.npz", **changes: Any) -> RunReader:
    """A run whose manifest vouches for `data`, seal and sha256 included."""
    folder = run / KIND
    (folder / "steps").mkdir(parents=True)
    if data is not None:
        (folder / "steps" / "step_000001.npz").write_bytes(data)
    record = {
        "step": 1,
        "file": file,
        "bytes": len(data or b""),
        "sha256": hashlib.sha256(data or b"").hexdigest(),
        "groups": 1,
        "responses": 1,
        "tokens": 1,
        "time": 0.0,
        **changes,
    }
    (folder / "manifest.jsonl").write_bytes(seal(record))
    return gradtrace.open_run(run)


def zipped(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def npy(shape: str, descr: str = "<f4", content: bytes = b"") -> bytes:
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content


def refusal(run: RunReader) -> str:
    with pytest.raises(StepUnreadableError) as error:
        run.step(KIND, 1)
    assert "step_000001" in str(run.problems[0])
    return str(error.value)


def test_a_forged_run_that_is_valid_is_read(tmp_path: Path) -> None:
    assert forge(tmp_path, dump_npz(step_arrays())).step(KIND, 1).n_groups == 3


class _Bomb:
    def __reduce__(self) -> Any:
        return (os.system, ("touch /tmp/gradtrace_was_here",))


def test_a_pickled_array_is_refused_and_not_run(tmp_path: Path) -> None:
    marker = Path("/tmp/gradtrace_was_here")
    marker.unlink(missing_ok=True)
    buffer = io.BytesIO()
    np.savez(buffer, **step_arrays(), surprise=np.array([_Bomb()], dtype=object))
    assert "pickled" in refusal(forge(tmp_path, buffer.getvalue()))
    assert not marker.exists()


def test_a_pickle_in_place_of_an_array_is_refused(tmp_path: Path) -> None:
    assert "header" in refusal(forge(tmp_path, zipped({"group.npy": pickle.dumps(_Bomb())})))


@pytest.mark.parametrize(
    "content",
    [
        npy("(1000000000000000,)"),
        npy("(1000000000, 1000000000, 1000000000)"),
        npy("(-1,)"),
        npy("(2,)", content=b"\0" * 9),
        npy("(99999999999999999999999,)"),
        npy("(1,)", "<f9", b"\0" * 9),
        npy("(1,)", "<U99999", b"\0" * 16),
        npy("(1,)", "|V4", b"\0" * 4),
        npy("(__import__('os').getpid(),)"),
        npy("(" * 3000 + ")" * 3000),
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\x09\x00\x00\x00",
    ],
)
def test_headers_that_declare_nonsense_are_refused_without_allocating(content: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(UnsafeNpzError):
        SafeNpz(zipped({"group.npy": content}))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 << 20


def test_a_zip_bomb_is_refused_without_inflating_it() -> None:
    zeros = 64 << 20
    bomb = zipped({"group.npy": npy(f"({zeros},)", "|u1", bytes(zeros))}, zipfile.ZIP_DEFLATED)
    assert len(bomb) < 1 << 20
    tracemalloc.start()
    with pytest.raises(UnsafeNpzError, match="zip bomb"):
        SafeNpz(bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 << 20


def test_a_member_that_inflates_to_more_than_it_declares_is_refused() -> None:
    """The directory says 1 kB, the data inflates to 8 MB: what is over the declared size is never made."""
    honest = zipped({"group.npy": npy("(8000000,)", "|u1", bytes(8_000_000))}, zipfile.ZIP_DEFLATED)
    true_size = struct.pack("<I", zipfile.ZipFile(io.BytesIO(honest)).infolist()[0].file_size)
    lying = honest.replace(true_size, struct.pack("<I", 1000))
    tracemalloc.start()
    with pytest.raises(UnsafeNpzError):
        SafeNpz(lying)["group"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 << 20


@pytest.mark.parametrize("name", ["../../evil.npy", "/etc/passwd.npy", "a/b.npy", "x.txt", "a b.npy", ".npy", "é.npy"])
def test_member_names_that_are_not_array_names_are_refused(name: str) -> None:
    with pytest.raises(UnsafeNpzError, match="member name"):
        SafeNpz(zipped({name: npy("(0,)")}))


def test_too_many_or_repeated_members_are_refused() -> None:
    with pytest.raises(UnsafeNpzError, match="300 arrays"):
        SafeNpz(zipped({f"a{i}.npy": npy("(0,)") for i in range(300)}))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("a.npy", npy("(0,)"))
        archive.writestr("a.npy", npy("(0,)"))
    with pytest.raises(UnsafeNpzError, match="two members"):
        SafeNpz(buffer.getvalue())


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compressions_are_refused(compression: int) -> None:
    with pytest.raises(UnsafeNpzError, match="compression"):
        SafeNpz(zipped({"a.npy": npy("(0,)")}, compression))


@pytest.mark.parametrize(
    "file",
    [
        "../../../etc/passwd",
        "/etc/passwd",
        "steps/../../secret.npz",
        "steps/step_000002.npz",
        "steps/x.npz",
        5,
        None,
    ],
)
def test_a_manifest_that_points_elsewhere_is_refused(file: Any, tmp_path: Path) -> None:
    run = forge(tmp_path, dump_npz(step_arrays()), file=file)
    assert run.steps(KIND) == []
    assert "not the name of a step file" in str(run.problems[0])


@pytest.mark.parametrize(
    "changes", [{"bytes": -1}, {"bytes": "9"}, {"step": 1.5}, {"sha256": 3}, {"more": 1}, {"bytes": True}]
)
def test_a_manifest_entry_of_the_wrong_shape_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    run = forge(tmp_path, dump_npz(step_arrays()), **changes)
    assert run.steps(KIND) == []
    assert run.problems


def test_a_step_that_declares_more_bytes_than_we_read_is_refused(tmp_path: Path) -> None:
    assert "declares" in refusal(forge(tmp_path, b"x", bytes=1 << 50))


def test_a_symlink_out_of_the_run_is_refused(tmp_path: Path) -> None:
    data = dump_npz(step_arrays())
    secret = tmp_path / "secret.npz"
    secret.write_bytes(data)
    run = forge(tmp_path / "run", None, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    (run.path / KIND / "steps" / "step_000001.npz").symlink_to(secret)
    assert "leads out of the run" in refusal(run)


def test_a_trace_folder_that_is_a_symlink_out_of_the_run_is_refused(tmp_path: Path) -> None:
    forge(tmp_path / "other", dump_npz(step_arrays()))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / KIND).symlink_to(tmp_path / "other" / KIND)
    run = gradtrace.open_run(tmp_path / "run")
    assert run.steps(KIND) == []
    assert "leads out of the run" in str(run.problems[0])


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "summary.json", "token_bytes.npz"])
def test_other_files_may_not_lead_out_of_the_run_either(name: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('{"password": 1}\n')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "secret")
    run = gradtrace.open_run(tmp_path / "run")
    assert [problem.where for problem in run.verify()] == [name]


def test_a_run_may_itself_be_a_symlink(tmp_path: Path) -> None:
    forge(tmp_path / "real", dump_npz(step_arrays()))
    (tmp_path / "latest").symlink_to("real")
    assert gradtrace.open_run(tmp_path / "latest").step(KIND, 1).n_groups == 3


def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path: Path) -> None:
    run = forge(tmp_path, None, bytes=10)
    os.mkfifo(run.path / KIND / "steps" / "step_000001.npz")
    assert "not a plain file" in refusal(run)


@pytest.mark.parametrize(
    "changes",
    [
        {"format_version": np.array([99], np.int32)},
        {"format_version": np.array([], np.int32)},
        {"format_version": np.array([1, 1], np.int32)},
        {"meta_json": np.frombuffer(b"[" * 100_000, np.uint8)},
        {"meta_json": np.frombuffer(b"[1]", np.uint8)},
        {"meta_json": np.frombuffer(b"\xff{}", np.uint8)},
        {"entropy": np.zeros(3, np.float64)},
        {"entropy": np.zeros((2, 2), np.float32)},
        {"token_offsets": np.array([0, 2**62, 2**62], np.int64)},
        {"prompt_offsets": np.array([0, -5, 3, 12], np.int64)},
        {"group": np.array([0, 0, 0, 1, 1, 7], np.int32)},
        {"group_status": np.array([0, 0, 77], np.uint8)},
        {"group_id": np.zeros((0,), np.int64)},
    ],
)
def test_columns_that_contradict_each_other_are_refused(changes: dict[str, np.ndarray], tmp_path: Path) -> None:
    refusal(forge(tmp_path, dump_npz(step_arrays(**changes))))


def test_columns_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    step = forge(tmp_path, dump_npz(step_arrays(unheard_of=np.zeros(2, np.float32)))).step(KIND, 1)
    assert "unheard_of" not in step.columns


def test_yaml_aliases_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)]
    (tmp_path / "config.yaml").write_text("\n".join(lines))
    run = gradtrace.open_run(tmp_path)
    assert run.config == {}
    assert "aliases" in str(run.problems[0])


def test_yaml_that_names_python_objects_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("!!python/object/apply:os.system ['true']")
    run = gradtrace.open_run(tmp_path)
    assert run.config == {}
    assert run.problems
