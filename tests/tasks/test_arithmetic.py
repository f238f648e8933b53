"""The demo's task: its one correct response, its first wrong token, its streams of prompts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from gradtrace.tasks import warm_start as making
from gradtrace.tasks.arithmetic import ArithmeticTask, Chain, misapply
from gradtrace.tasks.settings import ArithmeticConfig, WarmStartConfig
from gradtrace.tasks.warm_start import warm_start

EXAMPLE = Chain((3, 7, 4, 2, 9), "+*-+")
chains = st.builds(Chain.draw, st.integers(0, 10**6).map(random.Random), st.integers(min_value=1, max_value=6))


def task(seed: int = 0) -> ArithmeticTask:
    return ArithmeticTask(ArithmeticConfig(), seed)


def test_example_of_the_documentation() -> None:
    assert EXAMPLE.prompt == "3+7*4-2+9="
    assert EXAMPLE.solution() == "3+7=0*4=0-2=8+9=7"


@given(chains)
def test_every_step_of_the_solution_is_true(chain: Chain) -> None:
    text = chain.solution()
    value, steps = int(text[0]), text[1:]
    for start in range(0, len(steps), 4):
        operator, digit, equals, result = steps[start : start + 4]
        assert equals == "="
        value = eval(f"{value}{operator}{digit}") % 10
        assert int(result) == value


@given(chains)
def test_corrupted_steps_are_the_known_habits_and_the_chain_goes_on_from_them(chain: Chain) -> None:
    text = chain.solution(1.0, random.Random(0))
    value = int(text[0])
    for start in range(1, len(text), 4):
        operator, digit, _, result = text[start : start + 4]
        assert int(result) == misapply(value, operator, int(digit))
        value = int(result)


@given(chains, st.data())
def test_first_wrong_token_is_the_first_difference(chain: Chain, data: st.DataObject) -> None:
    arithmetic = task()
    item = {"expected": chain.solution()}
    right = [*arithmetic.encode(chain.solution()), arithmetic.stop_token_ids[0]]
    assert arithmetic.first_wrong_token(item, right) is None
    index = data.draw(st.integers(0, len(right) - 1))
    wrong = [*right[:index], data.draw(st.sampled_from([t for t in range(18) if t != right[index]]))]
    assert arithmetic.first_wrong_token(item, wrong) == index
    assert arithmetic.first_wrong_token(item, [*right, 5]) == len(right)


@given(chains)
def test_reward_is_one_exactly_where_no_token_is_wrong(chain: Chain) -> None:
    arithmetic = task()
    right, wrong = chain.solution(), chain.solution(0.5, random.Random(1))
    item = {"expected": right}
    for text in (right, wrong, right[:-1], ""):
        ids = [*arithmetic.encode(text), arithmetic.stop_token_ids[0]]
        assert arithmetic.reward(text, item) == float(arithmetic.first_wrong_token(item, ids) is None)


def test_tokenizer_is_one_token_per_character_and_survives_saving(tmp_path: Path) -> None:
    arithmetic = task()
    arithmetic.tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in (EXAMPLE.prompt, EXAMPLE.solution(), "1\n2"):
        ids = loaded(text)["input_ids"]
        assert ids == arithmetic.encode(text) == arithmetic.tokenizer(text)["input_ids"]
        assert loaded.decode(ids) == text
    assert loaded.eos_token_id == arithmetic.stop_token_ids[0]
    assert loaded.decode([*ids, loaded.eos_token_id], skip_special_tokens=True) == "1\n2"


def test_stream_continues_from_its_state_and_depends_on_the_seed() -> None:
    straight, resumed = task(), task()
    straight.next_prompts(5)
    resumed.load_state_dict(straight.state_dict())
    assert straight.next_prompts(7) == resumed.next_prompts(7)
    assert task(0).next_prompts(5) != task(1).next_prompts(5)


def test_training_and_validation_never_share_a_prompt() -> None:
    small = ArithmeticTask(ArithmeticConfig(operations=2), 0)  # few enough chains for collisions to be likely
    train = {prompt.item["prompt"] for prompt in small.next_prompts(2000)}
    validation = [prompt.item["prompt"] for prompt in small.validation_prompts(100)]
    assert not train & set(validation)
    assert len(set(validation)) == 100
    assert small.validation_prompts(50) == small.validation_prompts(100)[:50]


def test_warm_start_is_cached_by_its_settings(tmp_path: Path) -> None:
    settings = WarmStartConfig(max_steps=2, corrupted_steps=1, batch_size=4)
    config = ArithmeticConfig(hidden_size=16, layers=1, heads=2, warm_start=settings)
    folder = warm_start(config, tmp_path)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert warm_start(config, tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    other = warm_start(ArithmeticConfig(hidden_size=8, layers=1, heads=2, warm_start=settings), tmp_path)
    assert other != folder
    assert AutoModelForCausalLM.from_pretrained(folder).config.hidden_size == 16


def test_two_runs_that_make_the_same_warm_start_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = WarmStartConfig(max_steps=1, corrupted_steps=0)
    config = ArithmeticConfig(hidden_size=16, layers=1, heads=2, warm_start=settings)
    train, made = making.train, []

    def beside_another(*arguments: Any) -> Any:
        """While this run trains, another one ends with the same."""
        monkeypatch.setattr(making, "train", train)
        made.append(warm_start(config, tmp_path))
        return train(*arguments)

    monkeypatch.setattr(making, "train", beside_another)
    assert [warm_start(config, tmp_path)] == made
    assert AutoModelForCausalLM.from_pretrained(made[0]).config.hidden_size == 16
    assert list(tmp_path.iterdir()) == made, "nothing is left over"
