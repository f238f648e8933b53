"""`gradtrace select`: a ranked parquet of a data set or of saved rollouts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pyarrow.parquet
import pytest

from gradtrace.cli import main
from gradtrace.training.run import train
from tests.training import small


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("select")
    return train(small.config(folder, "trainer.total_steps=2", "trainer.entropy_trace.enable=true")).run_dir


def rows_file(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def ranking(path: Path) -> list[dict]:
    return pyarrow.parquet.read_table(path).to_pylist()


def test_demonstrations_of_the_same_kind_rank_above_others(run_dir: Path, tmp_path: Path) -> None:
    """Responses that are what validation asks for come first: the sign is right."""
    good = [{"prompt": f"{d}+1=", "response": "7777"} for d in range(4)]
    bad = [{"prompt": f"{d}+1=", "response": "++++"} for d in range(4)]
    data = rows_file(tmp_path / "data.jsonl", [*bad, *good])
    validation = rows_file(tmp_path / "val.jsonl", [{"prompt": "5+1=", "response": "7777"}])
    output = tmp_path / "ranked.parquet"
    assert main(["select", str(run_dir), data, "--validation", validation, "-o", str(output)]) == 0
    rows = ranking(output)
    assert [row["response"] for row in rows] == ["7777"] * 4 + ["++++"] * 4
    assert [row["rank"] for row in rows] == list(range(1, 9)) and rows[0]["row"] >= 4
    assert rows[0]["score"] > 0 and rows[0]["reward"] is None and rows[0]["advantage"] == 1.0
    about = pyarrow.parquet.read_schema(output).metadata
    assert b"lowers the validation loss" in about[b"gradtrace.sign"]


@pytest.mark.parametrize("method", ["ghost", "tangent"])
def test_saved_rollouts_are_ranked_and_both_methods_agree(
    run_dir: Path, tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / f"{method}.parquet"
    words = ["select", str(run_dir), f"{run_dir}:1", "--validation", str(run_dir), "-o", str(output)]
    assert main([*words, "--method", method]) == 0
    rows = ranking(output)
    printed = capsys.readouterr().out
    assert "advantage" in printed and f"{rows[0]['advantage']:+.2f}" in printed
    assert sorted(row["row"] for row in rows) == list(range(12))
    assert all(a["score"] >= b["score"] for a, b in itertools.pairwise(rows))
    assert len({row["reward"] for row in rows}) > 1
    other = tmp_path / "again.parquet"
    main([*words[:-1], str(other), "--method", "tangent"])
    by_row = {row["row"]: row["score"] for row in ranking(other)}
    for row in rows:
        assert row["score"] == pytest.approx(by_row[row["row"]], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(
    ("data", "validation", "words"),
    [
        ([{"prompt": "1+1="}], [{"prompt": "1+1=", "response": "2"}], "it needs `prompt`"),
        ([], [{"prompt": "1+1=", "response": "2"}], "no rows"),
        (
            [{"prompt": "1+1=", "response": "2"}],
            [
                {"prompt": "1+1=", "response": "2", "reward": 1},
                {"prompt": "1+1=", "response": "3", "reward": 1},
            ],
            "validation says nothing",
        ),
        (
            [{"prompt": "1+1=", "response": "2", "reward": 1}, {"prompt": "1+1=", "response": "3"}],
            [{"prompt": "1+1=", "response": "2"}],
            "row 1 has no reward",
        ),
    ],
)
def test_bad_data_is_an_error_that_names_it(
    run_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    data: list,
    validation: list,
    words: str,
) -> None:
    paths = [rows_file(tmp_path / f"{n}.jsonl", rows) for n, rows in (("data", data), ("val", validation))]
    assert main(["select", str(run_dir), paths[0], "--validation", paths[1]]) == 2
    assert words in capsys.readouterr().err


def test_a_folder_without_a_model_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["select", str(tmp_path), "x.jsonl", "--validation", "y.jsonl"]) == 2
    assert "is no model" in capsys.readouterr().err
