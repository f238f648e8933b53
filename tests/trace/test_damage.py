"""Every file of a run cut at every length and with bytes flipped throughout: found, named, and never a crash.

metrics.jsonl and a live run need one exception: a file that ends earlier than it did is what a reader sees of a run
that is still being written. So a cut metrics file gives a prefix of its records.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizer_families import FAMILIES
from trace_fakes import entropy_columns, influence_columns

import gradtrace
from gradtrace.trace.reader import RunReader
from gradtrace.trace.run_files import RunFiles
from gradtrace.trace.token_text import TokenBytes
from gradtrace.trace.writer import TraceWriter

STEP = "influence_trace/steps/step_000002.npz"
MANIFEST = "influence_trace/manifest.jsonl"
TRACE_SUMMARY = "influence_trace/summary.json"
ARTIFACTS = (STEP, MANIFEST, TRACE_SUMMARY, "metrics.jsonl", "summary.json", "token_bytes.npz")
FLIPS = (0x01, 0x20, 0xFF)
"""One bit, the case of a letter, all bits; in turns."""
Content = dict[str, Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunReader]:
    folder = tmp_path_factory.mktemp("damage") / "run"
    files = RunFiles(folder)
    files.write_token_bytes(TokenBytes.from_tokenizer(FAMILIES["characters"](folder)))
    with TraceWriter(folder, "influence_trace") as trace_writer:
        for step in (1, 2, 3):
            trace_writer.write(step, influence_columns(step, groups=1, siblings=2, length=3))
            files.log(step, {"critic/rewards/mean": step / 3, "note": "é"})
    files.write_summary({"reward": 0.5, "steps": 3})
    logging.disable()
    yield gradtrace.open_run(folder)
    logging.disable(logging.NOTSET)


def read_steps(run: RunReader) -> Content:
    return {
        step.step: (step.meta, {name: step[name].tobytes() for name in step.columns})
        for step in run.readable_steps("influence_trace")
    }


def read_token_bytes(run: RunReader) -> Any:
    tokens = run.token_bytes
    return tokens and (tokens.rules, [(tokens[i], tokens.flags(i)) for i in range(len(tokens))])


# what a reader gets from each file
READERS = {
    STEP: read_steps,
    MANIFEST: read_steps,
    TRACE_SUMMARY: read_steps,
    "metrics.jsonl": lambda run: run.metrics()[0],
    "summary.json": lambda run: run.summary,
    "token_bytes.npz": read_token_bytes,
}


@pytest.fixture(scope="module")
def truth(run: RunReader) -> Content:
    assert run.verify() == []
    return {name: reader(run) for name, reader in READERS.items()}


def read(path: Path, name: str) -> tuple[Any, set[str]]:
    """(what a reader gets from file `name`, the files it complained about)."""
    fresh = gradtrace.open_run(path)
    content = READERS[name](fresh)
    return content, {problem.where for problem in fresh.problems}


def damaged(run: RunReader, name: str, data: bytes) -> tuple[Any, set[str]]:
    path = run.path / name
    original = path.read_bytes()
    path.write_bytes(data)
    try:
        return read(run.path, name)
    finally:
        path.write_bytes(original)


def positions(size: int, name: str) -> list[int]:
    """All of a small file; of a bigger one its edges and a sample."""
    if size <= 1200 and name != STEP:
        return list(range(size))
    return sorted({*range(40), *range(size - 40, size), *range(0, size, max(1, size // 150))})


@pytest.mark.parametrize("name", ARTIFACTS)
def test_a_cut_file_is_found_at_every_length(name: str, run: RunReader, truth: Content) -> None:
    original = (run.path / name).read_bytes()
    for length in positions(len(original), name):
        content, complaints = damaged(run, name, original[:length])
        if name == "metrics.jsonl":
            count = original[:length].count(b"\n")
            assert content == truth[name][:count], length
        elif name in (STEP, MANIFEST):
            assert all(truth[name][step] == content[step] for step in content), length
            assert len(content) < 3, length
            assert name in complaints, length
        else:
            # an end that is only white space may be missing without loss
            assert name in complaints or content == truth[name], length


@pytest.mark.parametrize("name", ARTIFACTS)
def test_a_flipped_byte_is_found_anywhere(name: str, run: RunReader, truth: Content) -> None:
    original = (run.path / name).read_bytes()
    for index, position in enumerate(positions(len(original), name)):
        changed = bytearray(original)
        changed[position] ^= FLIPS[index % len(FLIPS)]
        content, complaints = damaged(run, name, bytes(changed))
        if name == "metrics.jsonl" and position == len(original) - 1:  # a last line that is being written, it seems
            assert content == truth[name][:-1]
        elif name == STEP:
            assert name in complaints, position
        else:
            assert name in complaints or content == truth[name], (position, content)
        if READERS[name] is read_steps:
            assert all(truth[name][step] == content[step] for step in content), position


@pytest.mark.parametrize("name", ARTIFACTS)
def test_a_missing_file_is_no_crash(name: str, run: RunReader, truth: Content) -> None:
    path = run.path / name
    aside = path.with_suffix(".aside")
    path.rename(aside)
    try:
        content, complaints = read(run.path, name)
    finally:
        aside.rename(path)
    if READERS[name] is read_steps:
        assert all(truth[name][step] == content[step] for step in content)
    if name in (STEP, MANIFEST):
        assert name in complaints


def test_damage_to_latest_step_changes_nothing_that_is_read(run: RunReader, truth: Content) -> None:
    path = run.path / "influence_trace/latest_step.txt"
    original = path.read_bytes()
    for data in (b"", b"99\n", b"\xff\n"):
        path.write_bytes(data)
        assert read(run.path, STEP) == (truth[STEP], set())
    path.write_bytes(original)


def test_a_problem_goes_away_when_the_step_is_written_again(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, "entropy_trace") as trace_writer:
        trace_writer.write(1, entropy_columns(1))
        trace_writer.flush()
        run = gradtrace.open_run(tmp_path)
        (tmp_path / "entropy_trace/steps/step_000001.npz").write_bytes(b"broken")
        assert list(run.readable_steps("entropy_trace")) == []
        assert "step_000001" in str(run.problems[0])
        trace_writer.write(1, entropy_columns(1))
        trace_writer.flush()
        assert len(list(run.readable_steps("entropy_trace"))) == 1
        assert run.verify() == []
