"""A reward function that misbehaves is named, with the item and the response."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from gradtrace.config.loader import load_config
from gradtrace.errors import GradtraceError
from gradtrace.tasks.rewards import (
    RewardFunction,
    add_rewards,
    batched,
    load_user_reward,
    named_reward,
    register_reward,
    rewards,
)
from gradtrace.tasks.rewards.simple import gsm8k, last_number
from gradtrace.training.components import build_reward

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
        ("12 + 3 = 15 dollars.\n#### 15", 1.0),
        ("12 + 3 = 14", 1.0),
        ("$5 x $3", 1.0),
        ("(2+1) X 5 = 15", 1.0),
        ("12 - 3 = 15", 0.0),
        ("15", 0.0),
        ("#### 15", 0.0),
        ("12 + 3, no: 12 * 3 = 36", 0.0),
        ("15 / 0", 0.0),
        ("2 ** 4 - 1", 0.0),
        ("", 0.0),
    ],
)
def test_a_calculation_is_computed_and_its_claimed_result_is_not_looked_at(response: str, reward: float) -> None:
    judge = named_reward("gsm8k_calculation")
    assert judge([response], [{"answer": "#### 15"}]) == [reward]


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


def test_decorated_function_is_a_reward_by_name_with_options(tmp_path: Path) -> None:
    file = tmp_path / "registered.py"
    source = (
        "from gradtrace.tasks.rewards import batched, register_reward\n"
        '@register_reward("test_short")\n'
        "def short(response, item, *, limit=3):\n    return len(response) <= limit\n"
        '@register_reward("test_shorts")\n@batched\n'
        "def shorts(responses, items, *, limit=3):\n    return [len(r) <= limit for r in responses]\n"
    )
    file.write_text(source)
    overrides = [f"reward.path={file}", "reward.options.limit=2"]
    for name in ("test_short", "test_shorts"):
        reward = build_reward(load_config([*overrides, f"reward.name={name}"]).reward)
        assert reward is not None and reward(["ab", "abc"], ITEMS) == [1.0, 0.0]
        assert name in rewards.names() and named_reward(name)(["abc", "abcd"], ITEMS) == [1.0, 0.0]
    file.write_text(source.replace("<=", ">"))  # loaded again, it replaces what it registered
    reward = build_reward(load_config([*overrides, "reward.name=test_short"]).reward)
    assert reward is not None and reward(["ab", "abc"], ITEMS) == [0.0, 1.0]


def test_name_that_is_taken_is_refused() -> None:
    with pytest.raises(GradtraceError, match="'gsm8k' is registered already"):
        register_reward("gsm8k")(lambda response, item: 0.0)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["reward.name=mat"], "did you mean 'math'"),
        (["reward.name=math", "reward.options.time_out=3"], "did you mean 'timeout'"),
        (["reward.options.timeout=3"], "the task's own reward has no options"),
        (["reward.name=math", "reward.extra.boxd_format=0.1"], "did you mean 'boxed_format'"),
        (["reward.extra.boxed_format=0.1"], "reward.extra adds to"),
    ],
)
def test_mistakes_are_named_before_anything_is_loaded(overrides: list[str], words: str) -> None:
    with pytest.raises(GradtraceError, match=words):
        load_config(overrides)


def test_unknown_option_of_an_own_reward_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def mine(response, item, *, limit=1):\n    return limit\n")
    reward = load_user_reward(f"{tmp_path}/mine.py:mine", options={"limit": 4})
    assert reward(["x"], ITEMS[:1]) == [4.0]
    with pytest.raises(GradtraceError, match="did you mean 'limit'"):
        load_user_reward(f"{tmp_path}/mine.py:mine", options={"limits": 4})


def test_extra_rewards_are_added_with_their_weights() -> None:
    reward = add_rewards(named_reward("gsm8k"), {"marker_format": 0.5, "boxed_format": 0.25})
    responses = ["#### 4", "\\boxed{4}", "#### 4 \\boxed{4}", "4"]
    assert reward(responses, [{"answer": "4"}] * 4) == [1.5, 0.25, 1.75, 1.0]
    assert reward.name == "gsm8k + 0.5·marker_format + 0.25·boxed_format"
    assert reward.parts["marker_format"] == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "think_format",
            ["<think>a</think>b", " <think>\na\n</think>\n\nb\n"],
            [
                "a",
                "<think>a</think>",
                "<think> </think>b",
                "x<think>a</think>b",
                "<think>a</think><think>b</think>c",
            ],
        ),
        (
            "answer_format",
            ["so <answer>4</answer>", "<answer>4</answer>\n"],
            ["4", "<answer></answer>", "<answer>4</answer> more", "</answer>4<answer>", "<answer>4"],
        ),
        ("boxed_format", ["so \\boxed{4}."], ["4", "\\boxed{}", "\\boxed{4", "\\boxed{3} \\boxed{4}"]),
        ("marker_format", ["so\n#### 4", "#### 4\n"], ["4", "####", "#### 4\nmore", "#### 3\n#### 4", ""]),
        (
            "code_format",
            ["so\n```python\nx\n```"],
            ["x", "```python\nx", "```\n```", "```\nx\n```\n```\ny\n```"],
        ),
    ],
)
def test_formats(name: str, good: list[str], bad: list[str]) -> None:
    reward = named_reward(name)
    assert reward(good, [{}] * len(good)) == [1.0] * len(good)
    assert reward(bad, [{}] * len(bad)) == [0.0] * len(bad)


@pytest.mark.parametrize("name", ["gsm8k", "last_number"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [("18", 1.0), ("$18.00", 1.0), ("18 dollars", 1.0), ("18%", 1.0), ("x = 18", 1.0), ("18 (9 + 9)", 1.0),
     ("not 18", 0.0), ("18 to 20", 0.0), ("17 to 18", 0.0), (r"\\ge 18", 0.0), ("at least 18", 0.0), ("18=19", 0.0),
     ("18 or 19", 0.0), ("1800%", 0.0), ("> 18", 0.0)],
)  # fmt: skip
def test_numbers_that_are_denied_bounded_or_left_open_are_no_answer(name: str, text: str, expected: float) -> None:
    response = f"#### {text}" if name == "gsm8k" else f"Answer: {text}"
    assert named_reward(name)([response], [{"answer": "18" if name == "last_number" else "#### 18"}]) == [expected]


def test_answer_in_nested_tags_is_the_innermost() -> None:
    item = {"answer": {"numbers": [1, 2], "target": 3}}
    reward = named_reward("countdown")
    assert reward(["<answer><answer>1+2</answer>", "<answer>1+2", "1+2</answer>"], [item] * 3) == [
        1.0,
        0.0,
        0.0,
    ]
