"""`gradtrace data prepare`: what is left out is counted, splits do not touch, the result trains as it is."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from gradtrace.errors import GradtraceError
from gradtrace.tasks.arithmetic import build_tokenizer
from gradtrace.tasks.datasets import DatasetTask
from gradtrace.tasks.prepare.prepare import Request, prepare
from gradtrace.tasks.prepare.recipes import COUNTDOWN, GSM8K, PREPARATIONS, beginning, operations, up_to_calculation
from gradtrace.tasks.rewards import named_reward
from gradtrace.tasks.settings import DataConfig
from tests.tasks.byte_model import byte_tokenizer

SHARED = Path("/work/shared/data")
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"the real data sets are not here ({SHARED})")


def verl(question: str, answer: str) -> dict[str, Any]:
    return {
        "data_source": "DAPO-17k",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": "train", "index": 0},
    }


def problems(count: int) -> list[dict[str, Any]]:
    return [verl(f"What is {i} plus {i}?", str(2 * i)) for i in range(count)]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(folder: Path, split: str) -> list[dict[str, Any]]:
    return pyarrow.parquet.read_table(folder / f"{split}.parquet").to_pylist()


def questions(folder: Path, split: str) -> list[str]:
    return [row["extra_info"]["question"] for row in read(folder, split)]


def left(report: dict[str, Any], words: str) -> int:
    return next(entry["left"] for entry in report["funnel"] if words in entry["step"])


def test_everything_left_out_is_counted(tmp_path: Path) -> None:
    rows = [
        *problems(20),
        verl("What is 3 plus 3?", "6"),  # a copy
        verl("What is  3 plus\n3?", "6"),  # another, in other white space
        verl("Which?", "1"),
        verl("Which?", "2"),  # contradicts
        verl("x" * 500, "1"),  # too long
    ]
    request = Request(
        "dapo_math", tmp_path / "out", write(tmp_path / "r.jsonl", rows), validation=5, max_prompt_length=400
    )
    report = prepare(request)
    assert left(report, "rows read") == 25
    assert left(report, "unique prompts") == 23
    assert left(report, "white space") == 22
    assert left(report, "contradictory") == 21
    assert left(report, "at most 400") == 20
    assert report["splits"] == {"train": 15, "validation": 5, "test": 0}
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| unique prompts | 23 |" in card and "split: validation" in card and "Apache-2.0" in card


def test_splits_do_not_touch_and_do_not_depend_on_the_order_of_rows(tmp_path: Path) -> None:
    rows = problems(40)
    shuffled = random.Random(1).sample(rows, len(rows))
    for name, some in (("a", rows), ("b", shuffled)):
        prepare(Request("dapo_math", tmp_path / name, write(tmp_path / f"{name}.jsonl", some), validation=0.2))
    assert set(questions(tmp_path / "a", "validation")) == set(questions(tmp_path / "b", "validation"))
    assert len(questions(tmp_path / "a", "validation")) == 8
    assert not set(questions(tmp_path / "a", "train")) & set(questions(tmp_path / "a", "validation"))


def test_near_copies_stay_on_one_side_of_the_split(tmp_path: Path) -> None:
    rows = [verl(f"What is {i} plus {i}{end}", str(2 * i)) for i in range(30) for end in ("?", " ?!")]
    prepare(Request("dapo_math", tmp_path / "out", write(tmp_path / "r.jsonl", rows), validation=10))
    sides = [
        {question.rstrip(" ?!") for question in questions(tmp_path / "out", split)} for split in ("train", "validation")
    ]
    assert len(sides[1]) == 5 and not sides[0] & sides[1]


def test_train_test_overlap_is_refused_even_behind_other_punctuation(tmp_path: Path) -> None:
    source = write(tmp_path / "train.jsonl", problems(10))
    test = write(tmp_path / "test.jsonl", [verl("what is *3* plus 3", "6"), verl("What is 77 plus 1?", "78")])
    request = Request("dapo_math", tmp_path / "out", source, test=(test,), validation=2)
    with pytest.raises(GradtraceError, match=r"1 problems are in the training and in the test data.*--drop-overlap"):
        prepare(request)
    assert not (tmp_path / "out").exists()
    report = prepare(Request("dapo_math", tmp_path / "out", source, test=(test,), validation=2, drop_overlap=True))
    assert report["dropped_because_in_test"] == ["What is 3 plus 3?"]
    assert report["splits"] == {"train": 7, "validation": 2, "test": 2}
    assert "What is 3 plus 3?" not in questions(tmp_path / "out", "train") + questions(tmp_path / "out", "validation")


def test_prepared_gsm8k_trains_as_it_is(tmp_path: Path) -> None:
    rows = [
        {"question": f"{i}+{i}?", "answer": f"{i}+{i}=<<{i}+{i}={2 * i}>>{2 * i}\n#### {1000 + 2 * i:,}"}
        for i in range(9)
    ]
    request = Request(
        "gsm8k",
        tmp_path / "gsm8k",
        write(tmp_path / "g.jsonl", rows),
        validation=1,
        instruction="=",
        system_prompt="",
    )
    prepare(request)
    data = DataConfig(
        train=[str(tmp_path / "gsm8k" / "train.parquet")],
        validation=[str(tmp_path / "gsm8k" / "validation.parquet")],
    )
    task = DatasetTask(data, build_tokenizer())
    items = [prompt.item for prompt in [*task.next_prompts(8), *task.validation_prompts(8)]]
    assert sorted(item["answer"] for item in items) == [str(1000 + 2 * i) for i in range(9)]
    assert {item["source"] for item in items} == {"gsm8k"}
    assert {item["prompt"] for item in items} == {f"{i}+{i}?=" for i in range(9)}


def test_shots_are_earlier_turns_of_the_conversation_and_right(tmp_path: Path) -> None:
    rows = [{"nums": [i, 3], "target": i + 3} for i in range(1, 5)]
    request = Request(
        "countdown",
        tmp_path / "out",
        write(tmp_path / "c.jsonl", rows),
        validation=1,
        shots=2,
        system_prompt="S",
    )
    prepare(request)
    messages = read(tmp_path / "out", "train")[0]["prompt"]
    assert [message["role"] for message in messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    for preparation in (COUNTDOWN, GSM8K):
        for question, answer in preparation.solved:
            numbers = [int(number) for number in re.findall(r"\d+", question)]
            item = {"answer": {"numbers": numbers[:-1], "target": numbers[-1]}}
            if preparation is GSM8K:
                item = {"answer": answer}
            assert named_reward(preparation.reward)([answer], [item]) == [1.0]
    with pytest.raises(GradtraceError, match="--shots 1: mbpp has 0"):
        prepare(Request("mbpp", tmp_path / "m", shots=1))


def test_few_operations_only(tmp_path: Path) -> None:
    rows = [{"question": f"question {i}", "answer": "<<1+1=2>>" * (i % 4) + f" #### {i}"} for i in range(12)]
    request = Request("gsm8k", tmp_path / "out", write(tmp_path / "g.jsonl", rows), validation=1, max_operations=2)
    report = prepare(request)
    assert sum(report["splits"].values()) == left(report, "at most 2 calculations") == 6
    with pytest.raises(GradtraceError, match="--max-operations"):
        prepare(Request("countdown", tmp_path / "c", count=5, max_operations=2))


def test_calculations_without_an_annotation_count_too() -> None:
    assert operations("5*2=10 miles, so 2+10=<<2+10=12>>12 miles\n#### 12") == 2
    assert operations("half of 48 is <<48/2=24>>24, and 48+24 is <<48+24=72>>72\n#### 72") == 2
    assert operations("Let x be it. 2x+1=7, 2x=6, x=3\n#### 3") == 3


def test_an_answer_can_begin_with_the_solution(tmp_path: Path) -> None:
    solution = "Ana had 3*4=<<3*4=12>>12 eggs.\nShe used 2.\nSo 12-2=<<12-2=10>>10 are left.\nThat is all.\n#### 10"
    assert beginning(solution, 1) == "Ana had 3*4=12 eggs.\nShe used 2.\n", "no annotation, no answer, no calculation"
    assert beginning(solution, 2) == "", "nothing is given where all of it is to be found"
    rows = [{"question": f"Question {i}", "answer": solution} for i in range(2)]
    source = write(tmp_path / "g.jsonl", rows)
    prepare(Request("gsm8k", tmp_path / "out", source, validation=1, steps_left=1))
    assert read(tmp_path / "out", "train")[0]["prompt"][-1] == {
        "role": "assistant",
        "content": beginning(solution, 1),
    }
    for wrong in (
        Request("countdown", tmp_path / "c", steps_left=1),
        Request("gsm8k", tmp_path, source, steps_left=-1),
    ):
        with pytest.raises(GradtraceError, match="--steps-left"):
            prepare(wrong)


def test_answers_may_begin_in_the_middle_of_a_sentence(tmp_path: Path) -> None:
    begun = "Tom ate 2*3=<<2*3=6>>6.\nThen he had $10 - $6 = $<<10-6=4>>4 left.\n#### 4"
    assert up_to_calculation(begun) == "Tom ate 2*3=6.\nThen he had "
    assert up_to_calculation("So (2 + 3) x 4 =<<(2+3)*4=20>>20\n#### 20") == "So "
    for uncut in (
        "4 boys * 2 = <<4*2=8>>8 boys, so 8 / 2 boys = <<8/2=4>>4\n#### 4",
        "x = 3, without a mark\n#### 3",
        "2 + 2 = <<2+2=4>>4, so 4 - 1 = 3\n#### 3",
    ):
        assert up_to_calculation(uncut) == "", "words within it, no calculation, or another one after it"
    rows = [{"question": f"Question {i}", "answer": begun} for i in range(2)]
    rows += [{"question": "Question 3", "answer": "2+2=<<2+2=4>>4\n#### 4"}]
    source = write(tmp_path / "g.jsonl", rows)
    report = prepare(Request("gsm8k", tmp_path / "out", source, validation=1, calculation_left=True))
    assert left(report, "words before a last calculation") == 2
    assert read(tmp_path / "out", "train")[0]["prompt"][-1]["content"] == up_to_calculation(begun)
    for wrong in (
        Request("countdown", tmp_path / "c", calculation_left=True),
        Request("gsm8k", tmp_path, source, calculation_left=True, steps_left=1),
    ):
        with pytest.raises(GradtraceError, match="--calculation-left"):
            prepare(wrong)


def test_small_whole_numbers_only(tmp_path: Path) -> None:
    kinds = {
        "small": ("Ana has 3 and 4.", "3+4=<<3+4=7>>7 #### 7"),
        "also small": ("Ana has 3 and 20.", "20-3=<<20-3=17>>17 #### 17"),
        "large on the way": ("Ana has 7 times 8 of 14.", "7*8=<<7*8=56>>56, 56/14=<<56/14=4>>4 #### 4"),
        "with thousands": ("Ana has 1,000 and 2.", "1000/2=<<1000/2=500>>500 #### 500"),
        "a decimal": ("Ana has $1.5 and 4.", "1.5*4=<<1.5*4=6>>6 #### 6"),
        "a fraction": ("Ana has 1/2 of 4.", "4/2=<<4/2=2>>2 #### 2"),
        "a share": ("Ana has 5% of 20.", "20*5%=<<20*5*.01=1>>1 #### 1"),
    }
    rows = [{"question": question, "answer": answer} for question, answer in kinds.values()]
    request = Request("gsm8k", tmp_path / "out", write(tmp_path / "g.jsonl", rows), validation=0.5, max_number=20)
    report = prepare(request)
    assert left(report, "whole numbers up to 20") == 2
    assert report["splits"] == {"train": 1, "validation": 1, "test": 0}, "a share is one of what is wanted"


def test_generated_countdown_is_the_same_every_time_and_has_no_repetition(tmp_path: Path) -> None:
    for name in ("a", "b"):
        prepare(Request("countdown", tmp_path / name, numbers=(2, 3), count=60, largest=9, validation=10))
    assert (tmp_path / "a" / "train.parquet").read_bytes() == (tmp_path / "b" / "train.parquet").read_bytes()
    truths = [row["reward_model"]["ground_truth"] for s in ("train", "validation") for row in read(tmp_path / "a", s)]
    assert len({(tuple(truth["numbers"]), truth["target"]) for truth in truths}) == 60
    assert {len(truth["numbers"]) for truth in truths} == {2, 3}
    with pytest.raises(GradtraceError, match="Lower --count"):
        prepare(Request("countdown", tmp_path / "c", numbers=(2,), count=500, largest=3))


def test_countdown_problems_are_the_same_in_any_order_of_numbers(tmp_path: Path) -> None:
    rows = [{"nums": [3, 5], "target": 8}, {"nums": [5, 3], "target": 8}, {"nums": [5, 3], "target": 2}]
    report = prepare(Request("countdown", tmp_path / "out", write(tmp_path / "c.jsonl", rows), validation=1))
    assert left(report, "unique prompts") == 2


def test_mbpp_keeps_its_tests_and_shows_them(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": "Write a function.",
            "code": "x",
            "test_imports": ["import math"],
            "test_list": [f"assert f{i}() == 1"],
        }
        for i in range(3)
    ]
    prepare(Request("mbpp", tmp_path / "out", write(tmp_path / "m.jsonl", rows), validation=1))
    row = read(tmp_path / "out", "train")[0]
    assert row["test_list"][0] in row["prompt"][0]["content"] and row["test_imports"] == ["import math"]


def test_benchmarks_take_their_own_rows_of_a_mixed_file(tmp_path: Path) -> None:
    rows = [
        {**verl(f"problem {name}", "1"), "data_source": name} for name in ("MATH-500", "AIME-2024-30", "AIME-2025-30")
    ]
    file = write(tmp_path / "mixed.jsonl", rows)
    for name, wanted in (("math500", "MATH-500"), ("aime24", "AIME-2024-30"), ("aime25", "AIME-2025-30")):
        assert prepare(Request(name, tmp_path / name, file))["splits"] == {
            "train": 0,
            "validation": 0,
            "test": 1,
        }
        assert questions(tmp_path / name, "test") == [f"problem {wanted}"]


@pytest.mark.parametrize(
    ("name", "row", "words"),
    [
        ("gsm8k", {"question": "x", "answer": "no number"}, "row 0.*#### number"),
        ("gsm8k", {"text": "x"}, "row 0.*question, prompt"),
        ("mbpp", {"prompt": "x"}, "row 0 is not a row of mbpp.*test_list"),
        ("countdown", {"prompt": "x"}, "row 0.*nums"),
        ("dapo_math", {"prompt": "x"}, "row 0.*no answer"),
    ],
)
def test_rows_of_another_data_set_are_named(tmp_path: Path, name: str, row: dict[str, Any], words: str) -> None:
    with pytest.raises(GradtraceError, match=words):
        prepare(Request(name, tmp_path / "out", write(tmp_path / "r.jsonl", [row])))


@pytest.mark.parametrize(
    ("name", "row", "right", "wrong"),
    [
        ("gsm8k", {"question": "x", "answer": "3+4=<<3+4=7>>7\n#### 1,007"}, "so\n#### 1007", "so\n#### 7"),
        ("dapo_math", verl("x", "34"), "thus \\boxed{34}", "thus \\boxed{35}"),
        ("math500", {"problem": "x", "answer": "\\frac{1}{2}"}, "\\boxed{0.5}", "\\boxed{0.05}"),
        ("countdown", {"nums": [3, 5], "target": 8}, "<answer>5 + 3</answer>", "<answer>8</answer>"),
        (
            "mbpp",
            {"prompt": "Write f.", "test_list": ["assert f(2) == 4"]},
            "```python\ndef f(x):\n    return 2 * x\n```",
            "```python\ndef f(x):\n    return x\n```",
        ),
    ],
    ids=["gsm8k", "dapo_math", "math500", "countdown", "mbpp"],
)
def test_reward_of_a_data_set_judges_its_prepared_rows(
    tmp_path: Path, name: str, row: dict[str, Any], right: str, wrong: str
) -> None:
    preparation = PREPARATIONS[name]
    example = preparation.example(row)
    assert example is not None
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([preparation.row(example, "train", 0)]), file)
    data = DataConfig(train=[str(file)], validation_fraction=0.0, max_prompt_length=10_000)
    item = DatasetTask(data, byte_tokenizer()).next_prompts(1)[0].item
    try:
        rewards = named_reward(preparation.reward)([right, wrong], [item, item])
    except GradtraceError as error:
        if "allows no isolation" in str(error):
            pytest.skip(str(error))
        raise
    assert rewards == [1.0, 0.0]


def test_validation_cannot_take_everything(tmp_path: Path) -> None:
    with pytest.raises(GradtraceError, match="nothing to train on"):
        prepare(Request("dapo_math", tmp_path / "out", write(tmp_path / "r.jsonl", problems(3)), validation=3))


@needs_shared
def test_dapo_math_17k_has_17290_unique_prompts(tmp_path: Path) -> None:
    source = str(SHARED / "dapo_math_17k" / "train.parquet")
    benchmarks = str(SHARED / "math_eval" / "math500_aime24_aime25.parquet")
    report = prepare(Request("dapo_math", tmp_path, source, test=(benchmarks,), drop_overlap=True))
    assert left(report, "rows read") == 17_917 and left(report, "unique prompts") == 17_290
    assert report["splits"]["test"] == 560
    assert len(report["dropped_because_in_test"]) == 8


@needs_shared
@pytest.mark.parametrize(
    ("name", "file", "count"),
    [("gsm8k", "gsm8k/train.jsonl", 7_473), ("mbpp", "mbpp/sanitized-mbpp.json", 427)],
)
def test_real_data_sets_are_read_whole(tmp_path: Path, name: str, file: str, count: int) -> None:
    assert sum(prepare(Request(name, tmp_path, str(SHARED / file)))["splits"].values()) == count
