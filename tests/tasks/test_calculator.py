"""The calculator task: what the tool replies, how answers are judged, and what the warm start is taught."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

import gradtrace
from gradtrace.config.loader import load_config
from gradtrace.errors import GradtraceError
from gradtrace.tasks.calculator import (
    STOP,
    VOCABULARY,
    Calculator,
    CalculatorTask,
    Exercise,
    build_tokenizer,
    draw_lessons,
    encode,
)
from gradtrace.tasks.settings import CalculatorConfig
from tests.training.small import model as small_model


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ("47*38", "1786"),
        ("-5-12", "-17"),
        ("3--4", "7"),
        ("47*", ""),
        ("1+2+3", ""),
        ("", ""),
        ("9" * 13 + "+1", ""),
    ],
)
def test_the_tool_does_one_operation_and_answers_nonsense_with_nothing(call: str, result: str) -> None:
    prompt = encode("1+1=<calc>2+2</calc><result>4</result>")
    assert Calculator().reply([*prompt, *encode(f"<calc>{call}</calc>")]) == (
        encode(f"<result>{result}</result>"),
        "calc",
    )


def test_the_answer_is_what_stands_after_the_last_result() -> None:
    task = CalculatorTask(CalculatorConfig())
    prompt = task.parse("47*38-906=")
    assert prompt is not None and prompt.item["answer"] == "880" and task.parse("47*38") is None
    assert task.find(prompt.ids) == prompt.item
    right = "<calc>47*38</calc><result>1786</result><calc>1786-906</calc><result>880</result>880"
    assert task.reward(right, prompt.item) == task.reward("880", prompt.item) == 1.0
    assert task.reward(right[:-3], prompt.item) == task.reward(right + "0", prompt.item) == 0.0


def test_validation_problems_are_never_trained_on() -> None:
    task = CalculatorTask(CalculatorConfig(digits=1))
    held_out = {prompt.item["prompt"] for prompt in task.validation_prompts(1000)}
    assert held_out and not held_out & {prompt.item["prompt"] for prompt in task.next_prompts(200)}


def test_lessons_teach_calls_and_never_what_the_tool_writes() -> None:
    config = CalculatorConfig(operations=2)
    tokens, learnt = draw_lessons(config, random.Random(0), 8)
    for row, own in zip(tokens.tolist(), learnt.tolist(), strict=True):
        text = "".join(VOCABULARY[t] for t in row)
        shown = "".join(VOCABULARY[t] for t, is_own in zip(row, own, strict=True) if is_own)
        assert text.count("<result>") == 2 and "<result>" not in shown and shown.count("<calc>") == 2
    problem, rng = Exercise((12, 7), "+"), random.Random(0)
    ((guess, written),) = problem.worked(1.0, rng)
    assert written and int(guess) != problem.answer


def test_tags_are_single_tokens_of_the_saved_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    build_tokenizer().save_pretrained(tmp_path)
    text = "<calc>12+7</calc><result>19</result>19"
    for tokenizer in (build_tokenizer(), AutoTokenizer.from_pretrained(tmp_path)):
        assert tokenizer(text).input_ids == encode(text)
        assert tokenizer.decode(encode(text)) == text


def test_turns_without_a_tool_are_refused_with_what_to_use(tmp_path: Path) -> None:
    with pytest.raises(GradtraceError, match=r"rollout.max_turns=2: task.name=arithmetic has no tool"):
        load_config(["rollout.max_turns=2"])
    with pytest.raises(GradtraceError, match="row 0 is no problem of the calculator task"):
        (tmp_path / "x.jsonl").write_text('{"prompt": "one plus one"}\n')
        CalculatorTask(CalculatorConfig()).read_prompts([str(tmp_path / "x.jsonl")], "data.validation")


def test_counterfactuals_of_a_loop_of_ones_own_call_the_tool() -> None:
    """V of the prompt and the ΔV of the policy's tokens add up to the reward; the tool's have none."""
    model = small_model(torch.float32, vocab_size=len(VOCABULARY))
    task = CalculatorTask(CalculatorConfig())
    prompt, item = encode("2+3="), {"answer": "5"}
    responses = [encode("<calc>2+3</calc><result>5</result>5") + [STOP], encode("7") + [STOP]]
    masks = [[True] * 5 + [False] * 3 + [True] * 2, [True, True]]
    options = {"k": 2, "max_new_tokens": 12, "environment": task.environment, "max_turns": 2}

    def judge(text: str) -> float:
        return task.reward(text, item)

    found = gradtrace.counterfactual(model, task.tokenizer, prompt, responses, judge, loss_mask=masks, **options)
    for one, mask, reward in zip(found, masks, (1.0, 0.0), strict=True):
        assert np.isnan(one.delta_v).tolist() == [not own for own in mask]
        assert one.value[0] + np.nansum(one.delta_v) == pytest.approx(reward)
    with pytest.raises(GradtraceError, match="give environment="):
        gradtrace.counterfactual(model, task.tokenizer, prompt, responses, judge, loss_mask=masks)
