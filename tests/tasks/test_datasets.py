"""Prompts from files: what is read, what is refused, where the stream is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from gradtrace.errors import GradtraceError
from gradtrace.tasks.arithmetic import build_tokenizer
from gradtrace.tasks.datasets import DatasetTask, stop_token_ids
from gradtrace.tasks.settings import DataConfig

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def task(file: str, **options: Any) -> DatasetTask:
    options = {"validation_fraction": 0.0, **options}
    return DatasetTask(DataConfig(train=[file], **options), build_tokenizer())


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_formats_give_the_same_prompts(tmp_path: Path, suffix: str) -> None:
    prompts = task(write(tmp_path / f"train.{suffix}", ROWS), shuffle=False).next_prompts(8)
    assert [prompt.item["prompt"] for prompt in prompts] == [row["prompt"] for row in ROWS]
    assert build_tokenizer().decode(prompts[3].ids) == "3+1="


def test_verl_columns_are_read_as_they_are(tmp_path: Path) -> None:
    row = {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": "1+1="}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
    }
    file = write(tmp_path / "t.parquet", [row])
    for options in ({}, {"answer_key": "reward_model.ground_truth"}):
        item = task(file, **options).next_prompts(1)[0].item
        assert item["answer"] == "2" and item["source"] == "gsm8k" and item["prompt"] == "1+1="


def test_own_answer_column_goes_before_verls(tmp_path: Path) -> None:
    row = {"prompt": "1+1=", "answer": "2", "reward_model": {"ground_truth": "3"}}
    assert task(write(tmp_path / "t.jsonl", [row])).next_prompts(1)[0].item["answer"] == "2"


def test_chat_template_system_prompt_and_instruction_are_applied(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}*{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    config = DataConfig(
        train=[write(tmp_path / "t.jsonl", ROWS[:1])],
        system_prompt="99",
        instruction="-5",
        validation_fraction=0.0,
    )
    prompt = DatasetTask(config, tokenizer).next_prompts(1)[0]
    assert tokenizer.decode(prompt.ids) == "99*0+1=-5*="


def test_an_answer_that_has_begun_is_gone_on_with(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}*{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    messages = [{"role": "user", "content": "2+2+3="}, {"role": "assistant", "content": "2+2=4"}]
    file = write(tmp_path / "t.jsonl", [{"prompt": messages, "answer": "7"}])
    config = DataConfig(train=[file], validation_fraction=0.0, instruction="-5")
    prompt = DatasetTask(config, tokenizer).next_prompts(1)[0]
    assert tokenizer.decode(prompt.ids) == "2+2+3=-5*2+2=4", "no end of turn, and the instruction is the user's"


def test_system_prompt_takes_the_place_of_the_rows_own(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}*{% endfor %}"
    messages = [{"role": "system", "content": "1"}, {"role": "user", "content": "2+2="}]
    file = write(tmp_path / "t.jsonl", [{"prompt": messages, "answer": "4"}])

    def text(**options: Any) -> str:
        config = DataConfig(train=[file], validation_fraction=0.0, **options)
        return tokenizer.decode(DatasetTask(config, tokenizer).next_prompts(1)[0].ids)

    assert text() == "1*2+2=*"
    assert text(system_prompt="9") == "9*2+2=*"


def test_folder_of_files_is_one_data_set(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ROWS[:3])
    write(tmp_path / "b.parquet", ROWS[3:])
    prompts = task(str(tmp_path), shuffle=False).next_prompts(8)
    assert [prompt.item["prompt"] for prompt in prompts] == [row["prompt"] for row in ROWS]


def test_hugging_face_data_sets_give_the_same_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="the optional package `datasets` is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "repository").mkdir()
    write(tmp_path / "repository" / "train.parquet", ROWS)
    write(tmp_path / "repository" / "test.parquet", ROWS[:2])
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    sources = [
        f"hf:{tmp_path / 'repository'}",
        f"hf:{tmp_path / 'repository'}:train",
        str(tmp_path / "saved"),
    ]
    for source in sources:
        prompts = task(source, shuffle=False).next_prompts(8)
        assert [prompt.item["prompt"] for prompt in prompts] == [row["prompt"] for row in ROWS], source
    assert len({p.item["prompt"] for p in task(f"hf:{tmp_path / 'repository'}:test").next_prompts(8)}) == 2
    with pytest.raises(GradtraceError, match=r"data\.train: hf:.*:nosplit cannot be loaded"):
        task(f"hf:{tmp_path / 'repository'}:nosplit")


def test_saved_splits_must_be_chosen(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the optional package `datasets` is not installed")
    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "saved")
    with pytest.raises(GradtraceError, match="holds the splits train, test; name one"):
        task(str(tmp_path / "saved"))
    assert len(task(str(tmp_path / "saved" / "train")).next_prompts(8)) == 8


def test_validation_on_training_prompts_is_refused(tmp_path: Path) -> None:
    train, validation = write(tmp_path / "t.jsonl", ROWS[:5]), write(tmp_path / "v.jsonl", ROWS[4:])
    with pytest.raises(GradtraceError, match=r"share 1 prompts, e.g. '4\+1='"):
        task(train, validation=[validation])
    assert len(task(train, validation=[write(tmp_path / "w.jsonl", ROWS[5:])]).validation_prompts(9)) == 3


def test_every_epoch_has_every_prompt_once_in_another_order(tmp_path: Path) -> None:
    stream = task(write(tmp_path / "t.jsonl", ROWS))
    epochs = [[p.item["prompt"] for p in stream.next_prompts(8)] for _ in range(3)]
    assert all(sorted(epoch) == sorted(row["prompt"] for row in ROWS) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("already", [0, 3, 8, 13])
def test_stream_continues_from_its_state(tmp_path: Path, already: int) -> None:
    file = write(tmp_path / "t.jsonl", ROWS)
    straight, resumed = task(file), task(file)
    straight.next_prompts(already)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    assert straight.next_prompts(20) == resumed.next_prompts(20)


def test_held_out_prompts_are_never_trained_on_and_do_not_depend_on_the_seed(tmp_path: Path) -> None:
    file = write(tmp_path / "t.jsonl", [*ROWS, *ROWS])  # each prompt twice
    config = DataConfig(train=[file], validation_fraction=0.25)
    first, second = (DatasetTask(config, build_tokenizer(), seed) for seed in (0, 1))
    held_out = [prompt.item["prompt"] for prompt in first.validation_prompts(100)]
    assert len(held_out) == 2
    assert held_out == [prompt.item["prompt"] for prompt in second.validation_prompts(100)]
    assert not {p.item["prompt"] for p in first.next_prompts(30)} & set(held_out)


def test_overlong_prompts_are_dropped_or_refused(tmp_path: Path) -> None:
    rows = [*ROWS, {"prompt": "1+1+1+1+1+1+1+1=", "answer": "8"}]
    file = write(tmp_path / "t.jsonl", rows)
    assert len({p.item["prompt"] for p in task(file, max_prompt_length=8).next_prompts(8)}) == 8
    with pytest.raises(GradtraceError, match=r"row 8: the prompt has 16 tokens.*max_prompt_length=8"):
        task(file, max_prompt_length=8, filter_overlong_prompts=False)
    with pytest.raises(GradtraceError, match="none is left"):
        task(file, max_prompt_length=2)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.jsonl", "", "no rows"),
        ("broken.jsonl", "{", "not valid JSON"),
        ("list.json", "[1, 2]", "must hold objects"),
        ("text.csv", "a,b", "must be .jsonl"),
        ("torn.parquet", "PAR1", "not a readable parquet"),
        ("number.jsonl", '{"prompt": 3, "answer": 3}', "must be a text or a list"),
        ("roles.jsonl", '{"prompt": [{"text": "x"}], "answer": 3}', "must be a text or a list"),
        ("columns.jsonl", '{"question": "x", "answer": "y"}', "data.prompt_key.*question, answer"),
    ],
)
def test_unreadable_data_says_why(tmp_path: Path, name: str, content: str, words: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(GradtraceError, match=words):
        task(str(tmp_path / name))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(GradtraceError, match=r"nowhere\.jsonl"):
        task(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(GradtraceError, match="Make it with: gradtrace data prepare gsm8k"):
        task(str(tmp_path / "gsm8k" / "train.parquet"))
    with pytest.raises(GradtraceError, match=r"holds no \.jsonl"):
        task(str(tmp_path))


def test_end_of_turn_stops_a_response_too() -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<|im_end|>"])
    assert stop_token_ids(tokenizer) == (tokenizer.eos_token_id, tokenizer.get_vocab()["<|im_end|>"])


@pytest.mark.parametrize("answer", ["", "  ", None])
def test_an_empty_answer_is_an_error_of_the_data(answer: str | None) -> None:
    with pytest.raises(GradtraceError, match=r"a\.jsonl, row 3 has an empty answer"):
        DatasetTask.reward("", {"answer": answer, "row": "a.jsonl, row 3"})
