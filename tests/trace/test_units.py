"""Sentences and lines of token texts, and numbers for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gradtrace.cli import main
from gradtrace.commands.trace_show import aggregate, units_of
from gradtrace.trace.columns import ragged
from gradtrace.trace.writer import TraceWriter
from tests.trace.trace_fakes import entropy_columns

TEXTS = ["So", " 3.5", " +", " 1", ".", " Then", " 4", "!", ")", "\n", "\n", "Done"]


def test_sentences_end_at_their_mark_and_lines_at_their_break() -> None:
    assert units_of(TEXTS, "sentence").tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3]
    assert units_of(TEXTS, "line").tolist() == [0] * 11 + [1]
    assert units_of(TEXTS, "token").tolist() == list(range(len(TEXTS)))
    assert units_of([], "line").tolist() == []


def test_scores_are_summed_and_entropies_averaged() -> None:
    units = np.array([0, 0, 1, 1, 2])
    values = np.array([1.0, 3.0, np.nan, 5.0, np.nan])
    np.testing.assert_array_equal(aggregate("delta_v", values, units), [4, 5, np.nan])
    np.testing.assert_array_equal(aggregate("influence", values, units), [4, 5, np.nan])
    np.testing.assert_array_equal(aggregate("entropy", values, units), [2, 5, np.nan])


def test_trace_show_by_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gradtrace.tasks.arithmetic import build_tokenizer
    from gradtrace.trace.token_text import TokenBytes

    columns = entropy_columns(groups=1, siblings=1)
    texts = [[5, 6, 3, 7, 8]]  # a newline in the middle
    columns["token_id"], columns["token_offsets"] = ragged(texts)
    columns["length"] = np.array([5])
    columns["entropy"] = np.array([1.0, 2.0, 3.0, 10.0, 20.0])
    columns["log_prob"] = np.zeros(5)
    with TraceWriter(tmp_path, "entropy_trace", on_error="raise") as writer:
        writer.write(1, columns)
    TokenBytes.from_tokenizer(build_tokenizer()).save(tmp_path / "token_bytes.npz")
    words = ["trace", "show", str(tmp_path), "--color", "never", "--by"]
    assert main([*words, "entropy,line"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[1] for line in lines if line and line[0] in ("0", "1")] == ["+2", "+15"]
    assert main([*words, "paragraph"]) == 2
