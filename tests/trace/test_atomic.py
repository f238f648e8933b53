"""A file or folder is whole or not there; sealed JSON comes back as it was."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradtrace.trace.files import (
    DamagedError,
    JsonLines,
    atomic_directory,
    atomic_write,
    remove_leftovers,
    seal,
    unseal,
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


keys = st.text().filter(lambda key: key != "check")


@settings(deadline=None)  # other work shares the machine
@given(st.dictionaries(keys, json_values, max_size=5), st.sampled_from([None, 2]))
def test_sealed_json_comes_back_as_it_was(record: dict[str, Any], indent: int | None) -> None:
    assert unseal(seal(record, indent)) == record


def test_a_record_with_a_check_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match="taken"):
        seal({"check": 1})


def test_sealing_takes_what_json_reads_back() -> None:
    record = {"loss": np.float32(0.5), "count": np.int64(3), 7: (1, 2), "bad": float("nan")}
    read = unseal(seal(record))
    assert read["loss"] == 0.5
    assert read["7"] == [1, 2]
    assert np.isnan(read["bad"])


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"a": 1}', b'{"a": 1, "check": "00000000"}', b"\xff"])
def test_json_without_its_seal_is_refused_where_it_is_needed(data: bytes) -> None:
    with pytest.raises(DamagedError):
        unseal(data)


def test_foreign_json_is_taken_where_it_may_be() -> None:
    assert unseal(b'{"a": 1}', strict=False) == {"a": 1}
    with pytest.raises(DamagedError):
        unseal(b'{"a": 1, "chesk": "00000000"}', strict=False)


@pytest.mark.parametrize("fsync", [False, True])
def test_a_folder_appears_whole(fsync: bool, tmp_path: Path) -> None:
    target = tmp_path / "checkpoints" / "step_000001"
    with atomic_directory(target, fsync) as unfinished:
        (unfinished / "sub").mkdir()
        (unfinished / "sub" / "weights").write_bytes(b"x")
        assert not target.exists()
    assert (target / "sub" / "weights").read_bytes() == b"x"
    assert os.listdir(target.parent) == ["step_000001"]
    with pytest.raises(FileExistsError), atomic_directory(target):
        pass


def test_a_folder_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), atomic_directory(tmp_path / "step") as unfinished:
        (unfinished / "weights").write_bytes(b"x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_leaves_no_folder_and_its_leftovers_can_be_removed(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        with atomic_directory(tmp_path / "step") as unfinished:
            (unfinished / "weights").write_bytes(b"x")
            os._exit(0)
    os.waitpid(child, 0)
    assert not (tmp_path / "step").exists()
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_lines_survive_a_torn_tail_and_go_on_after_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    JsonLines(path).append({"step": 1})
    with open(path, "ab") as file:
        file.write(b'{"step": 2, "lo')
    lines = JsonLines(path)
    lines.append({"step": 3})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3]
    lines.keep(lambda record: record["step"] < 3)
    lines.append({"step": 4})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 4]


def test_a_file_keeps_its_old_content_when_the_new_cannot_be_written(tmp_path: Path) -> None:
    atomic_write(tmp_path / "summary.json", b"old")
    with pytest.raises(TypeError):
        atomic_write(tmp_path / "summary.json", "not bytes")  # type: ignore[arg-type]
    assert (tmp_path / "summary.json").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["summary.json"]
