"""The older format comes over exactly, and a pickle in it can do nothing but name token ids."""

from __future__ import annotations

import builtins
import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib import format as npy

import gradtrace
from gradtrace.commands.rollouts.legacy import import_legacy, unpickle_id_lists
from gradtrace.errors import GradtraceError
from gradtrace.trace.safe_npz import UnsafeNpzError

PROMPTS = [[1, 2, 3], [1, 2, 3], [9], [9]]
LENGTHS = [2, 4, 1, 3]


def older_step(seed: int = 0, **changes: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    mask = (np.arange(4) < np.array(LENGTHS)[:, None]).astype(np.int64)
    prompts = np.empty(4, dtype=object)
    prompts[:] = PROMPTS
    arrays = {
        "responses": rng.integers(0, 50, (4, 4)) * mask,
        "response_mask": mask,
        "influence": (rng.standard_normal((4, 4)) * mask).astype(np.float16),
        "entropies": (rng.random((4, 4)) * mask).astype(np.float32),
        "reward": np.array([0, 1, 1, 1], np.float32),
        "accepted": np.array([False, True, True, True]),
        "group_id": np.array([7, 7, 3, 3]),
        "prompt_ids": prompts,
        "data_source": np.array(["gsm8k"] * 4, dtype=object),
    }
    return {name: array for name, array in {**arrays, **changes}.items() if array is not None}


def import_one(tmp_path: Path, arrays: dict[str, np.ndarray], compressed: bool = False) -> Any:
    (tmp_path / "old" / "steps").mkdir(parents=True)
    (np.savez_compressed if compressed else np.savez)(tmp_path / "old" / "steps" / "step_12.npz", **arrays)
    return import_legacy(tmp_path / "old", tmp_path / "run")


@pytest.mark.parametrize("compressed", [False, True])
def test_padding_goes_and_every_value_stays(compressed: bool, tmp_path: Path) -> None:
    old = older_step()
    report = import_one(tmp_path, old, compressed)
    assert (report.kind, report.steps, report.refused) == ("influence_trace", [12], {})
    step = gradtrace.open_run(tmp_path / "run").step("influence_trace", 12)
    assert step["length"].tolist() == LENGTHS
    for r, length in enumerate(LENGTHS):
        tokens = step.tokens(r)
        assert tokens["token_id"].tolist() == old["responses"][r, :length].tolist()
        assert tokens["entropy"].tolist() == old["entropies"][r, :length].tolist()
        assert tokens["influence_position"].tolist() == old["influence"][r, :length].astype(np.float32).tolist()
    assert [step.response(r).accepted for r in range(4)] == [False, True, True, True]
    groups = [step.group(g) for g in range(2)]
    assert [(group.group_id, group.prompt_ids.tolist(), group.responses) for group in groups] == [
        (3, [9], [2, 3]),
        (7, [1, 2, 3], [0, 1]),
    ]
    assert [str(group.status.name) for group in groups if group.status is not None] == [
        "CONSTANT_REWARD",
        "SCORED",
    ]
    assert step.meta["credit"] == ["position"]


def test_string_group_ids_and_one_prompt_per_group(tmp_path: Path) -> None:
    prompts = np.empty(2, dtype=object)
    prompts[:] = [np.array([5, 6]), [8]]
    import_one(tmp_path, older_step(group_id=np.array(["a", "a", "b", "b"]), prompt_ids=prompts))
    step = gradtrace.open_run(tmp_path / "run").step("influence_trace", 12)
    assert [step.group(g).prompt_ids.tolist() for g in range(2)] == [[5, 6], [8]]


def test_entropies_alone_become_an_entropy_trace(tmp_path: Path) -> None:
    report = import_one(tmp_path, older_step(influence=None))
    assert report.kind == "entropy_trace"
    step = gradtrace.open_run(tmp_path / "run").step("entropy_trace", 12)
    assert np.isnan(step["log_prob"]).all()
    assert np.isfinite(step["entropy"]).all()


def test_tokens_without_a_score_are_marked_not_captured(tmp_path: Path) -> None:
    influence = older_step()["influence"].copy()
    influence[1, 2] = np.nan
    import_one(tmp_path, older_step(influence=influence))
    captured = gradtrace.open_run(tmp_path / "run").step("influence_trace", 12).tokens(1)["captured"]
    assert captured.tolist() == [True, True, False, True]


@pytest.mark.parametrize(
    "elements",
    [
        [[1, 2], [3]],
        [[], [1, 2**40, -5]],
        [np.array([1, 2, 3]), np.array([4], np.int32)],
        [np.array([], np.int64), [7]],
        [np.array([1, 2], ">i4"), [np.int64(3), np.int32(4)]],
        [list(range(2000)), np.arange(2000, dtype=np.uint16)],
    ],
)
@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_prompts_of_lists_and_arrays_are_read_in_every_protocol(elements: list[Any], protocol: int) -> None:
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    read = unpickle_id_lists(pickle.dumps(array, protocol=protocol), len(elements))
    assert [ids.tolist() for ids in read] == [[int(value) for value in element] for element in elements]


class _Runs:
    """A pickle that calls `function(*arguments)`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


HOSTILE = [
    _Runs(os.system, "touch /tmp/gradtrace_was_here"),
    _Runs(builtins.eval, "open('/tmp/gradtrace_was_here', 'w')"),
    _Runs(np.load, "/tmp/x.npy", None, True),
    _Runs(np.ndarray, (10**9,)),
    _Runs(bytearray, 10**11),
    {"a": 1},
    "text",
    3,
    [1.5],
    [[1], [2]],
    [None],
    [2**70],
    np.array([1.5]),
    np.array([[1, 2]]),
    np.array(["x"]),
    np.array([{}], dtype=object),
]


@pytest.mark.parametrize("thing", HOSTILE, ids=lambda thing: type(thing).__name__)
def test_a_hostile_pickle_is_refused_and_not_run(thing: Any, tmp_path: Path) -> None:
    marker = Path("/tmp/gradtrace_was_here")
    marker.unlink(missing_ok=True)
    prompts = np.empty(4, dtype=object)
    prompts[:] = [thing, [1], [1], [1]]
    report = import_one(tmp_path, older_step(prompt_ids=prompts))
    assert report.steps == []
    assert "step_12.npz" in report.refused
    assert not marker.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04.",
        b"\x80\x04r\xff\xff\xff\x7f.",  # put at a huge memo index
        b"\x80\x04]\x8e\xff\xff\xff\xff\xff\xff\xff\x00.",  # 2**56 bytes announced
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",  # a frame of 2**63 bytes
        b"\x80\x04K\x01" + b"2" * 1000 + b".",  # DUP is not among the operations
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x82\x01.",  # an extension code
        b"Ppersistent\n.",
    ],
)
def test_raw_hostile_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(UnsafeNpzError):
        unpickle_id_lists(data, 1)


@pytest.mark.parametrize(
    ("thing", "complaint"),
    [(_Runs(os.system, "true"), r"asks for posix.system"), ({"a": 1}, "uses EMPTY_DICT")],
)
def test_the_refusal_says_what_the_pickle_wanted(thing: Any, complaint: str) -> None:
    array = np.empty(1, dtype=object)
    array[0] = thing
    with pytest.raises(UnsafeNpzError, match=complaint):
        unpickle_id_lists(pickle.dumps(array, protocol=4), 1)


def test_every_truncation_and_flip_of_the_pickle_is_refused_or_harmless() -> None:
    array = np.empty(3, dtype=object)
    array[:] = [[1, 2, 3], np.array([4, 5]), [6]]
    data = pickle.dumps(array, protocol=4)
    for position in range(len(data)):
        for changed in (
            data[:position],
            data[:position] + bytes([data[position] ^ 0xFF]) + data[position + 1 :],
        ):
            try:
                read = unpickle_id_lists(changed, 3)
            except UnsafeNpzError:
                continue
            assert all(ids.dtype == np.int64 for ids in read)


def test_a_file_that_lacks_an_array_is_named_and_the_rest_is_imported(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    np.savez(folder / "step_1.npz", **older_step(1))
    np.savez(folder / "step_2.npz", **older_step(2, reward=None))
    np.savez(folder / "step_3.npz", **older_step(3, entropies=np.zeros((2, 2))))
    (folder / "step_4.npz").write_bytes(b"PK broken")
    report = import_legacy(folder, tmp_path / "run")
    assert report.steps == [1]
    assert list(report.refused) == ["step_2.npz", "step_3.npz", "step_4.npz"]
    assert "reward" in report.refused["step_2.npz"]


def test_a_folder_without_steps_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(GradtraceError, match="no step files"):
        import_legacy(tmp_path, tmp_path / "run")


def test_numpy_writes_object_arrays_the_way_we_read_them(tmp_path: Path) -> None:
    """If a later NumPy pickles arrays in another way, this is the test that says so."""
    array = np.empty(1, dtype=object)
    array[0] = np.array([1, 2])
    stream = io.BytesIO()
    npy.write_array(stream, array, allow_pickle=True)
    start = 10 + int.from_bytes(stream.getvalue()[8:10], "little")
    assert unpickle_id_lists(stream.getvalue()[start:], 1)[0].tolist() == [1, 2]
