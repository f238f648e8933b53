"""The files of a step are joined by rows and group ids, whatever their order, and gaps are marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from gradtrace.cli import main
from gradtrace.instruments.blame import BLAME
from gradtrace.instruments.entropy_trace import ENTROPY_TRACE
from gradtrace.instruments.tracin import TRACIN, TracinReason
from gradtrace.trace.columns import ragged
from gradtrace.trace.reader import StepUnreadableError, read_run
from gradtrace.trace.table import StepTable
from gradtrace.trace.writer import TraceWriter

ANSWERS = [[1, 2], [3], [4, 5, 6], [7, 8]]
GROUP = [0, 0, 1, 1]


def layout(rows: list[int], groups: list[int], answers: list[list[int]], group_ids: list[int]) -> dict[str, Any]:
    """The columns of every file: responses of these rows (-1: not of the rollout), in groups with these ids."""
    token_id, token_offsets = ragged(answers)
    prompt_ids, prompt_offsets = ragged([[90 + group_id] for group_id in group_ids])
    return {
        "group_id": np.array(group_ids), "prompt_ids": prompt_ids, "prompt_offsets": prompt_offsets,
        "group": np.array(groups), "row": np.array(rows), "reward": np.array(rows, np.float32),
        "finished": np.ones(len(rows), bool), "accepted": np.array([row % 2 == 1 for row in rows]),
        "token_id": token_id, "token_offsets": token_offsets,
    }  # fmt: skip


def write(path: Path, kind: str, columns: dict[str, Any]) -> None:
    with TraceWriter(path, kind, on_error="raise") as writer:
        writer.write(1, columns)


def write_rollout(path: Path) -> None:
    columns = layout([0, 1, 2, 3], GROUP, ANSWERS, [5, 7])
    write(path, ENTROPY_TRACE, columns | {"entropy": np.arange(8.0)})


def write_blame(path: Path, rows: list[int], answers: list[list[int]] | None = None) -> None:
    """Blame of these rows, in this order; its groups stand in the other order."""
    answers = [ANSWERS[row] for row in rows] if answers is None else answers
    columns = layout(rows, [1 - GROUP[row] for row in rows], answers, [7, 5])
    size = len(columns["token_id"])
    numbers = {
        "optimizer_step": np.array(rows) + 10,
        "grad_share": np.array(rows) / 10,
        "grad_norm": np.ones(len(rows)),
    }
    write(path, BLAME, columns | numbers | {"token_grad_share": columns["token_id"] * 1.0, "push": np.zeros(size)})


def test_files_in_another_order_are_joined_by_row_and_gaps_are_marked(tmp_path: Path) -> None:
    write_rollout(tmp_path)
    write_blame(tmp_path, [3, 0, 2])
    table = read_run(tmp_path).step_table(1)
    assert table.problems == [] and list(table.parts) == [ENTROPY_TRACE, BLAME]
    np.testing.assert_array_equal(table.need("token_grad_share"), [1, 2, np.nan, 4, 5, 6, 7, 8])
    np.testing.assert_allclose(table.need("grad_share"), [0, np.nan, 0.2, 0.3], rtol=1e-6)
    assert table.need("optimizer_step").tolist() == [10, -1, 12, 13]
    assert table.need("accepted").tolist() == [False, True, False, True]  # of the entropy trace
    assert table.need("accepted", BLAME).tolist() == [False, False, False, True]
    assert table.need("group", BLAME).tolist() == [0, -1, 1, 1]
    assert table.groups_in(BLAME).tolist() == [1, 0]
    assert table.value("grad_share", 1) is None and table.value("optimizer_step", 3) == 13
    assert table.column("entropy", BLAME) is None and table.column("reference_gap") is None


def test_members_tokens_and_prompts(tmp_path: Path) -> None:
    write_rollout(tmp_path)
    table = read_run(tmp_path).step_table(1)
    assert [table.members(g).tolist() for g in range(table.n_groups)] == [[0, 1], [2, 3]]
    assert [table.ids(r).tolist() for r in range(table.n_responses)] == ANSWERS
    assert table.tokens_of([3, 0]).tolist() == [6, 7, 0, 1]
    assert table.prompt(1).tolist() == [97] and table.expected(1).tolist() == []
    assert list(table.everyone()) == [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)]


def test_rows_of_minus_one_are_no_part_of_the_rollout(tmp_path: Path) -> None:
    columns = layout([-1, 2, 3, -1], [0, 1, 1, 0], [[9], [4, 5, 6], [7, 8], [9, 9]], [8, 7])
    reasons = np.array([int(TracinReason.VALIDATION), 0, 0, int(TracinReason.VALIDATION)])
    columns |= {"score": np.array([np.nan, 0.2, 0.3, np.nan]), "kept": np.ones(4, bool), "reason": reasons}
    write(tmp_path, TRACIN, columns)
    alone = read_run(tmp_path).step_table(1)
    assert alone.row.tolist() == [2, 3] and alone.n_groups == 1 and alone.prompt(0).tolist() == [97]
    assert alone.group.tolist() == [0, 0] and alone.token_id.tolist() == [4, 5, 6, 7, 8]
    write_rollout(tmp_path)
    joined = read_run(tmp_path).step_table(1)
    assert joined.first.kind == ENTROPY_TRACE and joined.problems == []
    np.testing.assert_allclose(joined.need("score"), [np.nan, np.nan, 0.2, 0.3], rtol=1e-6)
    assert joined.groups_in(TRACIN).tolist() == [-1, 1]


@pytest.mark.parametrize("answers", [[[1, 2], [4, 5, 60]], [[1, 2], [4, 5]]])
def test_other_responses_in_the_same_rows_are_left_out_and_told(tmp_path: Path, answers: list[list[int]]) -> None:
    write_rollout(tmp_path)
    write_blame(tmp_path, [0, 2], answers)
    table = read_run(tmp_path).step_table(1)
    assert "1 of its responses are not those of entropy_trace" in table.problems[0]
    np.testing.assert_array_equal(table.need("token_grad_share"), [1, 2, *[np.nan] * 6])


def test_the_file_with_most_responses_gives_the_order(tmp_path: Path) -> None:
    write_blame(tmp_path, [3, 0, 2, 1])
    table = read_run(tmp_path).step_table(1)
    assert table.row.tolist() == [3, 0, 2, 1] and table.first.kind == BLAME
    write_rollout(tmp_path)
    assert read_run(tmp_path).step_table(1).row.tolist() == [0, 1, 2, 3]  # as many: the first instrument's


def test_a_channel_is_a_column_that_a_file_has_or_that_others_give(tmp_path: Path) -> None:
    write_rollout(tmp_path)
    table = read_run(tmp_path).step_table(1)
    assert list(table.channels()) == ["entropy"]
    columns = layout([0, 1, 2, 3], GROUP, ANSWERS, [5, 7])
    write(tmp_path, ENTROPY_TRACE, columns | {"ratio": np.full(8, np.e)})
    table = read_run(tmp_path).step_table(1)
    assert list(table.channels()) == ["mismatch"] and table.channels()["mismatch"].channel == "Ratio"
    np.testing.assert_allclose(table.need("mismatch"), np.ones(8), rtol=1e-6)


def test_show_and_export_read_all_instruments_of_a_step_joined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = layout([0, 1, 2, 3], GROUP, ANSWERS, [5, 7])
    numbers = {"ratio": np.full(8, np.e), "policy_version": np.arange(4), "last_policy_version": np.arange(4)}
    write(tmp_path, ENTROPY_TRACE, columns | numbers | {"entropy": np.arange(8.0)})
    write_blame(tmp_path, [3, 0, 2])
    show = ["trace", "show", str(tmp_path), "--color", "never", "--group", "0", "--by"]
    for column, values in (("token_grad_share", ["+1", "+2", "+nan"]), ("mismatch", ["+1", "+1", "+1"])):
        assert main([*show, column]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert [line[1:3] for line in lines if line[0].isdigit()] == [[each, f"+{i}"] for i, each in enumerate(values)]
    assert main([*show, "token_grad_share", "--kind", ENTROPY_TRACE]) == 2
    assert "this step has entropy, ratio, mismatch" in " ".join(capsys.readouterr().err.split())

    target = tmp_path / "tokens.parquet"
    assert main(["trace", "export", str(tmp_path), str(target)]) == 0
    frame = pyarrow.parquet.read_table(target).to_pandas()
    assert list(frame.columns[:4]) == ["step", "group_id", "response", "position"] and "mismatch" not in frame
    assert frame.row.tolist() == [0, 0, 1, 2, 2, 2, 3, 3] and frame.entropy.tolist() == list(range(8))
    np.testing.assert_array_equal(frame.token_grad_share, [1, 2, np.nan, 4, 5, 6, 7, 8])
    assert frame.optimizer_step.tolist() == [10, 10, -1, 12, 12, 12, 13, 13]
    assert main(["trace", "export", str(tmp_path), str(target), "--kind", BLAME]) == 0
    alone = pyarrow.parquet.read_table(target).to_pandas()
    assert alone.row.tolist() == [3, 3, 0, 0, 2, 2, 2] and "entropy" not in alone


def test_validation_prompts_are_shown_and_exported_with_the_file_that_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = layout([2, 3, -1], [1, 1, 0], [[4, 5, 6], [7, 8], [9, 9]], [7, 7])
    reasons = np.array([0, 0, int(TracinReason.VALIDATION)])
    write(
        tmp_path, TRACIN, columns | {"score": np.array([0.2, 0.3, np.nan]), "kept": np.ones(3, bool), "reason": reasons}
    )
    write_rollout(tmp_path)
    assert main(["trace", "show", str(tmp_path), "--kind", TRACIN, "--group", "0"]) == 0
    assert "response 2 · reward -1 · accepted · score nan · kept True · reason validation" in capsys.readouterr().out
    for words, rows in (([], 8), (["--kind", TRACIN], 7)):
        assert main(["trace", "export", str(tmp_path), str(tmp_path / "t.parquet"), *words]) == 0
        frame = pyarrow.parquet.read_table(tmp_path / "t.parquet").to_pandas()
        assert len(frame) == rows and frame.reason.isna().sum() == (3 if not words else 0)


def test_a_step_without_files_is_an_error(tmp_path: Path) -> None:
    write_rollout(tmp_path)
    with pytest.raises(StepUnreadableError, match="no files of step 7"):
        read_run(tmp_path).step_table(7)
    assert isinstance(read_run(tmp_path).step_table(1), StepTable)
