"""What the benchmark runner promises: targets are checked, and the table says what was measured where."""

from __future__ import annotations

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import benchmarks.__main__ as runner
from benchmarks import common
from benchmarks.__main__ import TARGETS, benchmark_names, missed_targets
from benchmarks._pages import between_marks
from benchmarks._table import describe, question_of, table
from benchmarks._tracin_effect_page import holm, two_sided
from benchmarks.common import Timing, emit, median_interval, relative
from gradtrace.intervals import Interval, paired_difference


def test_a_ratio_that_misses_its_target_is_named() -> None:
    (sentence,) = missed_targets({"speedup_token_5184": 7.9, "overhead_capture_smollm2": 1.05})
    assert sentence == "speedup_token_5184 is 7.9, to reach: ≥ 8"
    assert missed_targets({"overhead_capture_smollm2": 1.2}) == ["overhead_capture_smollm2 is 1.2, to reach: ≤ 1.1"]
    assert missed_targets({"speedup_token_5184": 8.0, "a_ratio_without_target": 0.1}) == []


def test_not_a_number_misses_every_target() -> None:
    assert len(missed_targets({"speedup_token_5184": float("nan")})) == 1


def test_every_target_has_a_bound() -> None:
    assert all(describe(target) for target in json.loads(TARGETS.read_text()).values())


def test_p_values_are_those_of_students_t_and_holm_corrects_them() -> None:
    difference = paired_difference([1.0, 2.0, 3.0, 4.0, 5.0], [0.0] * 5)  # t = 3 / (√2.5 / √5) = 4.243, 4 degrees
    assert two_sided(difference) == pytest.approx(0.01324, abs=1e-4)
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_the_interval_of_a_median_holds_it_as_often_as_it_says() -> None:
    draw = random.Random(0)
    for rounds in (6, 9, 25):
        found = [median_interval([draw.expovariate(1.0) for _ in range(rounds)]) for _ in range(2000)]
        inside = sum(one.low <= 0.6931 <= one.high for one in found) / len(found)
        assert 0.94 < inside < 0.985, (rounds, inside)  # discrete: the next narrower one would hold less than 95 %
    few = median_interval([3.0, 1.0, 2.0])
    assert (few.mean, few.low, few.high) == (2.0, 1.0, 3.0)
    assert median_interval([1.5]).high == 1.5


def test_a_result_gives_intervals_of_rounds_and_of_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    timing = Timing(theirs=[2.0, 3.0, 4.0], ours=[1.0, 1.0, 1.0])
    share = relative(Interval(-0.1, -0.2, 0.1, 5), base=0.5)
    emit("x", {"speedup": timing, "accuracy": share, "one_seed": Interval(1, *[float("nan")] * 2, 1), "bytes": 7}, {})
    result = json.loads(capsys.readouterr().out)
    assert result["ratios"] == {"speedup": 3.0, "accuracy": 0.8, "one_seed": 1, "bytes": 7}
    assert result["ranges"] == {"speedup": [2.0, 4.0], "accuracy": [0.6, 1.2]}


def test_what_was_measured_with_this_code_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "RESULTS", tmp_path)
    monkeypatch.setattr(runner, "code", lambda: "abc")
    assert not runner.is_measured("solvers")
    runner.save({"name": "solvers", "ratios": {}}, minutes=1.234)
    stored = (tmp_path / "solvers.json").read_text()
    assert json.loads(stored)["minutes"] == 1.2
    assert stored.count("\n") == len(json.loads(stored)) + 2, "one line for each key"
    assert runner.is_measured("solvers")
    monkeypatch.setattr(runner, "code", lambda: "def")
    assert not runner.is_measured("solvers")


def test_the_code_that_is_measured_is_that_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "REPOSITORY", tmp_path)
    (tmp_path / "src" / "__pycache__").mkdir(parents=True)
    program = tmp_path / "src" / "program.py"
    program.write_text("1")
    first = common.code()
    (tmp_path / "src" / "__pycache__" / "program.pyc").write_text("compiled")
    (tmp_path / "docs.md").write_text("told")
    assert common.code() == first
    program.write_text("2")
    assert common.code() != first and common.study_folder("validity").parent.name == common.code()


def test_what_is_timed_runs_alone_and_studies_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running: set[str] = set()
    beside: dict[str, set[str]] = {}
    both = threading.Barrier(2)

    def run(name: str, quick: bool) -> dict[str, str]:
        running.add(name)
        if name in runner.STUDIES:
            both.wait(10)  # breaks unless the other one runs as well
        beside[name] = set(running) - {name}
        if name in runner.STUDIES:
            both.wait(10)
        running.remove(name)
        return {"name": name}

    for name, minutes in (("deletion", 9), ("validity", 20.5)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"minutes": minutes}))
    monkeypatch.setattr(runner, "RESULTS", tmp_path)
    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(runner.os, "sched_getaffinity", lambda process: {0, 1})
    found = runner.run_all(["deletion", "rollout", "solvers", "validity"], quick=True)
    assert list(found) == ["rollout", "solvers", "validity", "deletion"]
    assert beside == {"rollout": set(), "solvers": set(), "validity": {"deletion"}, "deletion": {"validity"}}


def test_the_longest_study_begins_first_and_an_unknown_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, minutes in (("deletion", 9), ("validity", 20.5)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"minutes": minutes}))
    monkeypatch.setattr(runner, "RESULTS", tmp_path)
    names = ["deletion", "growth", "validity"]
    assert sorted(names, key=runner.last_minutes, reverse=True) == ["growth", "validity", "deletion"]


def test_studies_and_pages_are_of_benchmarks_that_exist() -> None:
    assert set(runner.STUDIES) | set(runner.WRITE_PAGES) <= set(benchmark_names())


def test_studies_may_write_parts_of_one_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n<!-- a: begin -->\nold\n<!-- a: end -->\n\n<!-- b: begin -->\n<!-- b: end -->\nend\n")
    with ThreadPoolExecutor(2) as pool:
        for text in map(str, range(20)):
            list(pool.map(between_marks, [page, page], ["a", "b"], [f"A{text}", f"B{text}"]))
            written = page.read_text()
            assert f"A{text}" in written and f"B{text}" in written and written.endswith("end\n"), written
    with pytest.raises(SystemExit, match="has no <!-- c: begin -->"):
        between_marks(page, "c", "")


def test_every_benchmark_answers_a_question() -> None:
    assert all(question_of(name) for name in benchmark_names())


def test_table_groups_by_question_and_names_machine_and_versions_once() -> None:
    result = {
        "name": "solvers",
        "ratios": {"speedup_token_5184": 14.0, "memory_token_5184": 2.0},
        "ranges": {"speedup_token_5184": [13.0, 15.0]},
        "versions": {"torch": "2.13"},
        "machine": "a box",
        "day": "2026-11-15",
        "code": "abc",
    }
    other = result | {"name": "rollout", "ratios": {"speedup_generate_tiny": 1.5}}
    text = table([result, other], {"speedup_token_5184": {"min": 8}, "speedup_generate_tiny": {"min": 2}})
    assert "| `speedup_token_5184` | 14.00 | 13.00 … 15.00 | ≥ 8 | yes | solvers |" in text
    assert "| `speedup_generate_tiny` | 1.50 |  | ≥ 2 | **no** | rollout |" in text
    assert "| `memory_token_5184` | 2.00 |  | solvers |" in text.split("## Details")[1]
    assert text.count("a box") == 1 and "- 2026-11-15, a box; torch 2.13; code abc: everything" in text
    assert "solvers" in benchmark_names()
