"""What the benchmark runner promises: targets are checked, and the table says what was measured where."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import TARGETS, benchmark_names, describe, missed_targets, table
from benchmarks._tracin_effect_page import holm, two_sided
from gradtrace.intervals import paired_difference


def test_a_ratio_that_misses_its_target_is_named() -> None:
    (sentence,) = missed_targets({"speedup_token_5184": 7.9, "overhead_capture_smollm2": 1.05})
    assert sentence == "speedup_token_5184 is 7.9, to reach: ≥ 8"
    assert missed_targets({"overhead_capture_smollm2": 1.2}) == [
        "overhead_capture_smollm2 is 1.2, to reach: ≤ 1.1"
    ]
    assert missed_targets({"speedup_token_5184": 8.0, "a_ratio_without_target": 0.1}) == []


def test_not_a_number_misses_every_target() -> None:
    assert len(missed_targets({"speedup_token_5184": float("nan")})) == 1


def test_every_target_has_a_bound() -> None:
    assert all(describe(target) for target in json.loads(TARGETS.read_text()).values())


def test_p_values_are_those_of_students_t_and_holm_corrects_them() -> None:
    difference = paired_difference(
        [1.0, 2.0, 3.0, 4.0, 5.0], [0.0] * 5
    )  # t = 3 / (√2.5 / √5) = 4.243, 4 degrees
    assert two_sided(difference) == pytest.approx(0.01324, abs=1e-4)
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_table_names_machine_and_versions() -> None:
    result = {
        "name": "solvers",
        "ratios": {"speedup_token_5184": 14.0},
        "versions": {"torch": "2.13"},
        "machine": "a box",
        "day": "2026-11-15",
    }
    text = table([result])
    assert "| solvers | `speedup_token_5184` | 14.00 | ≥ 8 |" in text
    assert "- solvers: 2026-11-15, a box; torch 2.13" in text
    assert "solvers" in benchmark_names()
