"""Countdown: generated problems can be solved, right answers are right however they are written, tricks are not."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrace.tasks.countdown import (
    Exercise,
    NotAnExpressionError,
    compute,
    countdown,
    countdown_plain,
    is_solution,
)

ITEM: dict[str, Any] = {"answer": {"numbers": [3, 5, 2], "target": 13}}


@given(st.integers(0, 10_000), st.integers(2, 5))
def test_generated_problem_has_its_solution(seed: int, count: int) -> None:
    problem = Exercise.draw(random.Random(seed), count, 20)
    assert is_solution(problem.solution, problem.numbers, problem.target)
    assert not is_solution(problem.solution, problem.numbers, problem.target + 1)


@pytest.mark.parametrize(
    "response",
    [
        "<answer>3 + 5 * 2</answer>",
        "First <answer>1</answer>, no: <answer> (5*2) + 3 = 13 </answer> done",
        "<answer>\n3+2×5\n</answer>",
        "<answer>3 - -(5 * 2)</answer>",
    ],
)
def test_right_answers(response: str) -> None:
    assert countdown(response, ITEM) == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "3 + 5 * 2",  # no tags
        "<answer>3 + 5 * 2",
        "<answer>13</answer>",
        "<answer>3 + 5 + 2</answer>",  # not 13
        "<answer>3 + 5 * 2 * 1</answer>",  # a number of its own
        "<answer>3 + 5 + 5</answer>",  # 5 twice
        "<answer>3 + 5 * 2</answer> <answer>3</answer>",  # the last one counts
        "<answer>3 + 5 * 2; 1</answer>",
        "<answer>3 + 5 // 2</answer>",
        "<answer>3 ** 5 - 2</answer>",
        "<answer>9**9**9**9</answer>",
        "<answer>__import__('os').getcwd()</answer>",
        "<answer>(3)(5)</answer>",
        "<answer>3 / (5 - 5) * 2</answer>",
        "<answer>" + "(" * 5000 + "</answer>",
        "<answer></answer>",
        "<answer>=13</answer>",
    ],
)
def test_wrong_answers(response: str) -> None:
    assert countdown(response, ITEM) == 0.0


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("3 + 5 * 2 = 13", 1.0),
        ("We get 13 by 3 + (5 * 2).", 1.0),
        ("2 + 3 = 5\n5*2 + 3 = 13\nso 13 it is", 1.0),
        ("<answer>3 + 5 * 2</answer>", 1.0),
        ("3 + 5 * 2 = 13\nor 3 + 5", 0.0),  # the last one counts
        ("13", 0.0),
        ("13 = 3 + 5 * 2", 0.0),  # what is computed stands left
        ("", 0.0),
    ],
)
def test_plain_answers_need_no_tags(response: str, reward: float) -> None:
    assert countdown_plain(response, ITEM) == reward


def test_verls_ground_truth_is_read_too() -> None:
    item = {"answer": "a worked solution", "reward_model": {"ground_truth": {"numbers": [2, 4], "target": 8}}}
    assert countdown("<answer>2*4</answer>", item) == 1.0


def test_values_are_exact() -> None:
    assert compute("1 / 3 * 3") == 1
    assert compute("7 / 2") == Fraction(7, 2)
    with pytest.raises(NotAnExpressionError):
        compute("f(3)")
