"""A reward function that misbehaves is named, with the item and the response."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from gradtrace.errors import GradtraceError
from gradtrace.tasks.rewards import RewardFunction, batched, gsm8k, last_number, load_user_reward

ITEMS = [{"prompt": "p0", "answer": "4"}, {"prompt": "p1", "answer": "5"}]


def failing(response: str, item: dict[str, Any]) -> float:
    if item["prompt"] == "p1":
        raise KeyError("oops")
    return 1.0


@batched
def failing_batch(responses: list[str], items: list[dict[str, Any]]) -> list[float]:
    return [failing(response, item) for response, item in zip(responses, items, strict=True)]


@pytest.mark.parametrize("function", [failing, failing_batch])
def test_exception_names_function_item_and_response(function: Any) -> None:
    with pytest.raises(GradtraceError) as caught:
        RewardFunction("mine.py:failing", function)(["first", "second"], ITEMS)
    message = str(caught.value)
    assert all(word in message for word in ("mine.py:failing", "KeyError", "oops", "p1", "'second'"))
    assert "'first'" not in message


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "good"])
def test_what_is_not_a_finite_number_is_refused(value: object) -> None:
    with pytest.raises(GradtraceError, match="not a finite number") as caught:
        RewardFunction("mine", lambda response, item: value)(["text"], ITEMS[:1])
    assert "'text'" in str(caught.value) and "p0" in str(caught.value)


def test_wrong_number_of_rewards_is_refused() -> None:
    short = batched(lambda responses, items: [1.0])
    with pytest.raises(GradtraceError, match="1 rewards for 2 responses"):
        RewardFunction("mine", short)(["a", "b"], ITEMS)


def test_long_responses_are_shortened_in_the_message() -> None:
    with pytest.raises(GradtraceError) as caught:
        RewardFunction("mine", lambda response, item: math.nan)(["x" * 10**6], ITEMS[:1])
    assert len(str(caught.value)) < 2000


def test_user_reward_is_loaded_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def length(response, item):\n    return len(response)\n")
    assert load_user_reward(f"{file}:length")(["abc", ""], ITEMS) == [3.0, 0.0]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("{dir}/mine.py", "FILE:FUNCTION"),
        ("{dir}/other.py:length", "other.py"),
        ("{dir}/mine.py:missing", "no function 'missing'"),
        ("{dir}/broken.py:length", "ZeroDivisionError"),
    ],
)
def test_user_reward_that_cannot_be_loaded_says_why(tmp_path: Path, path: str, words: str) -> None:
    (tmp_path / "mine.py").write_text("def length(response, item):\n    return 1\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(GradtraceError, match=words):
        load_user_reward(path.format(dir=tmp_path))


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("so it is\n#### 72", "48+24 = 72\n#### 72", 1.0),
        ("#### 1,234", "#### 1234", 1.0),
        ("#### $72.00", "#### 72", 1.0),
        ("#### 71", "#### 72", 0.0),
        ("the answer is 72", "#### 72", 0.0),
        ("#### 5 then #### 72", "#### 72", 1.0),
        ("#### ", "#### 72", 0.0),
        ("####-3", "-3", 1.0),
    ],
)
def test_gsm8k(response: str, answer: str, reward: float) -> None:
    assert gsm8k(response, {"answer": answer}) == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("so \\boxed{3} no, \\boxed{34}", 1.0),
        ("Answer: 34", 1.0),
        ("Answer: 3", 0.0),
        ("34", 0.0),
        ("answer: $34$", 1.0),
    ],
)
def test_last_number(response: str, reward: float) -> None:
    assert last_number(response, {"answer": "34"}) == reward
