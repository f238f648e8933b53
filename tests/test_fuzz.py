"""Whatever is written on the command line, in a model's folder or in a data set: a sentence comes out, no traceback."""

from __future__ import annotations

import json
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradtrace.cli import main, parse
from gradtrace.config.keys import schema_keys
from gradtrace.config.loader import load_config
from gradtrace.config.root import Config
from gradtrace.errors import GradtraceError
from gradtrace.policy.load import load_model, load_tokenizer, load_with_adapters
from gradtrace.policy.settings import ModelConfig
from gradtrace.tasks.datasets import DatasetTask
from gradtrace.tasks.rewards import RewardFunction, named_reward
from gradtrace.tasks.settings import DataConfig
from gradtrace.training.run import train
from tests.training import small

VALUES = [
    *("", "null", "1e400", "-1", "nan", "-inf", "abc", "[", "[1,2", "1,2", "{a: b}", "[]", "'", '"', "\\", "\n", "="),
    *("a=b", "${x}", "${oc.env:HOME}", "${trainer.seed}", "${.}", "${", "${}", "${a:b", "[${x}]", "{a: ${x}}", "???"),
    *("*mlp*", "[*mlp*]", "['(']", "mlp", "[mlp]", "[null]", "{}", "{1: 2}", "[1,a,null]", "[[[[", "[1e400]", "[true]"),
    *("\ud800", "😀", "a\x00b", "true", "1" * 30, "0", "1", "0.5", "12:30:45", "0x10", "1_000", "inf", "-0", "[2,2]"),
    *("!!python/object:os.system", "/no/such", "../..", "_self_", "~", "+", "hf:x/y", "@file", "''", "[-1]"),
]  # fmt: skip
WORDS = [
    *("x", "=", "=1", "a b", "+a=1", "~a", "recipe=", "recipe=\x00", "recipe=/", "recipe=.", "recipe=/etc/passwd"),
    *("recipe=/dev/null.yaml", "resume=/", "resume=\x00", "resume=.", "trainer.total_steps", "trainer..x=1", ".=1"),
    *("trainer.=1", "trainer=1", "trainer={total_steps: x}", "trainer=null", "verl.a.b=1", "verl=1", "cluster=[]"),
    *("reward.options=1", "reward.extra.x=1", "reward.extra=1", "algorithm.advantage_options.x=1", "\ud800=1"),
]  # fmt: skip


def sentence_or_nothing(attempt: Callable[[], Any], what: object) -> None:
    try:
        attempt()
    except GradtraceError as error:
        assert str(error).strip(), what
    except Exception as error:
        raise AssertionError(f"{what!r}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("part", range(4))
def test_overrides(part: int) -> None:
    rng = random.Random(part)
    keys = sorted(schema_keys(Config))
    overrides = [f"{rng.choice(keys)}={rng.choice(VALUES)}" for _ in range(130)] + WORDS[part::4]
    for word in overrides:
        sentence_or_nothing(lambda word=word: load_config([word]), word)  # type: ignore[misc]


FACTORS = "trainer.influence_trace.credit=position"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([FACTORS, "trainer.influence_trace.module_name_filter=[*mlp*]"], "looks like a glob: `mlp` alone"),
        ([FACTORS, "trainer.influence_trace.module_name_filter=['(']"], "is no regular expression"),
        (["trainer.influence_trace.module_name_filter=[mlp]"], "belongs to scores from captured factors"),
        (["trainer.seed=${nothing}"], "trainer.seed: Interpolation key 'nothing' not found"),
        (["trainer.validation.pass_k=${oc.env:HOME}"], "pass_k"),
        (
            [FACTORS, "rollout.n=1", "algorithm.advantage=reinforce_plus_plus", "trainer.traces=true"],
            "one response, and these scores compare accepted with rejected responses",
        ),
        ([FACTORS, "trainer.influence_trace.force_gpu_compute=true"], "grad_offload_to_cpu=true as well"),
        (
            [FACTORS, "trainer.influence_trace.projection_dim_factor=0", "trainer.influence_trace.max_hessian_dim=64"],
            "max_hessian_dim=64 caps a projection, and without projection_dim_factor there is none",
        ),
        (["trainer.seed=1,2"], "one value is needed"),
    ],
)
def test_what_is_said(words: list[str], expected: str) -> None:
    with pytest.raises(GradtraceError) as error:
        load_config(words)
    assert expected in str(error.value)


def test_one_word_is_a_list_of_one() -> None:
    config = load_config([FACTORS, "trainer.influence_trace.module_name_filter=mlp", "data.train=train.jsonl"])
    assert list(config.trainer.influence_trace.module_name_filter) == ["mlp"]
    assert config.data.train == ["train.jsonl"]


def test_the_default_score_needs_no_sibling() -> None:
    words = ["rollout.n=1", "algorithm.advantage=reinforce_plus_plus", "trainer.traces=true"]
    assert load_config(words).trainer.influence_trace.enable


def test_one_trace_can_be_left_out_of_traces() -> None:
    trainer = load_config(["trainer.traces=true", "trainer.influence_trace.enable=false"]).trainer
    assert trainer.entropy_trace.enable and not trainer.influence_trace.enable
    trainer = load_config(["trainer.traces=true"]).trainer
    assert trainer.entropy_trace.enable and trainer.influence_trace.enable


def test_options_and_words_in_any_order(capsys: pytest.CaptureFixture[str]) -> None:
    orders = (
        ["train", "--cfg", "trainer.seed=5", "rollout.n=4"],
        ["train", "trainer.seed=5", "--cfg", "rollout.n=4"],
        ["train", "trainer.seed=5", "rollout.n=4", "--cfg"],
    )
    shown = set()
    for words in orders:
        assert main(words) == 0
        shown.add(capsys.readouterr().out)
    assert len(shown) == 1 and "seed: 5" in shown.pop()


@pytest.mark.parametrize(
    ("command", "words", "options"),
    [
        ("probe", ["runs/demo", "evaluation_prompts=4"], ["--output", "here"]),
        ("verify", ["runs/demo", "lr=1"], ["--fresh", "--groups", "2"]),
        ("ablate", ["recipe=demo", "sweep.influence.credit=tail,position"], ["--repeat", "2"]),
        ("doctor", ["max_modules=2", "credit=tail"], ["--model", "m"]),
        ("select", ["model", "data.jsonl"], ["--validation", "val.jsonl"]),
    ],
)
def test_options_stand_before_between_or_behind_the_words(command: str, words: list[str], options: list[str]) -> None:
    orders = ([*options, *words], [words[0], *options, *words[1:]], [*words, *options])
    first, *others = (vars(parse([command, *order])) for order in orders)
    for name in ("func", "run"):
        for found in (first, *others):
            found.pop(name, None)
    assert all(found == first for found in others)


def test_ablation_on_verl_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablate", "engine=verl", "sweep.influence.hessian_mode=inverse,identity"]) == 2
    assert "engine=verl: an ablation scores one rollout in this process" in capsys.readouterr().err


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return train(small.config(folder, "trainer.total_steps=1")).run_dir / "policy"


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Cut, flipped, emptied, or replaced by what belongs elsewhere."""
    kind = rng.randrange(8)
    if kind == 0:
        return content[: rng.randrange(len(content))]
    if kind == 1:
        at = rng.randrange(min(len(content), 200))
        return content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]
    if kind == 2:
        return b""
    if kind == 3:
        return b"[" * 100_000
    if kind == 4:
        return b"\xff\xfe\x00" + content
    if kind == 5:
        return b'{"architectures": 3, "model_type": [], "hidden_size": "x"}'
    if kind == 6:
        return content.replace(b"16", b"17")
    return content.replace(b'"', b"", 3)


def test_model_folders(model: Path, tmp_path: Path) -> None:
    rng = random.Random(0)
    names = sorted(path.name for path in model.iterdir() if path.is_file())
    for number in range(60):
        folder = tmp_path / str(number)
        folder.mkdir()
        target = rng.choice(names)
        for path in model.iterdir():
            content = path.read_bytes()
            (folder / path.name).write_bytes(damaged(content, rng) if path.name == target else content)
        sentence_or_nothing(lambda folder=folder: load_tokenizer(folder), (number, target))  # type: ignore[misc]
        load = lambda folder=folder: load_model(folder, ModelConfig(device="cpu"))  # noqa: E731
        sentence_or_nothing(load, (number, target))


ODD = [
    *(None, "", " ", "\ud800", "a\x00b", "😀" * 50, 1, 1.5, float("nan"), 10**400, True, [], {}, [1], [[]], "1" * 5000),
    *([{"role": "user", "content": "1+1="}], [{"role": "user", "content": None}], [{"role": 3, "content": "x"}]),
    *([{"content": "x"}], [{"role": "nobody", "content": "x"}], [{"role": "user", "content": "\ud800"}]),
]  # fmt: skip


def test_data_rows(model: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(model)
    rng = random.Random(0)
    file = tmp_path / "rows.jsonl"
    for _ in range(150):
        row = {rng.choice(["prompt", "answer", "x"]): rng.choice(ODD) for _ in range(3)}
        rows = [{"prompt": "1+2=", "answer": "3"}] * 3 + [row]
        file.write_text("\n".join(json.dumps(row) for row in rows))
        config = DataConfig(train=[str(file)])
        sentence_or_nothing(lambda config=config: DatasetTask(config, tokenizer), row)  # type: ignore[misc]


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe",
        b"[" * 200_000,
        b"{",
        b"3",
        b"null",
        b'"x"',
        b'{"a": 1}\n[',
        b"\x00" * 100,
        b'[{"prompt": "\\ud800"}]',
    ],
)
@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
def test_data_files(model: Path, tmp_path: Path, content: bytes, suffix: str) -> None:
    file = tmp_path / f"rows{suffix}"
    file.write_bytes(content)
    with pytest.raises(GradtraceError, match="rows"):
        DatasetTask(DataConfig(train=[str(file)]), load_tokenizer(model))


def test_recipes_that_are_no_text(tmp_path: Path) -> None:
    contents = (b"\xff\xfe\x00", b"[" * 50_000, b"a: [", b"- 1", b"", b"a: !!python/object:os.x")
    for number, content in enumerate(contents):
        file = tmp_path / f"{number}.yaml"
        file.write_bytes(content)
        with pytest.raises(GradtraceError, match=rf"{number}\.yaml"):
            load_config([f"recipe={file}"])


class Odd:
    def __float__(self) -> float:
        raise KeyError("no number")

    def __repr__(self) -> str:
        raise KeyError("no text")


def test_odd_rewards() -> None:
    for value in (10**400, 10**5000, Odd(), "x", None, float("inf"), [], 1j):
        reward = RewardFunction("mine", lambda response, item, value=value: value)
        with pytest.raises(GradtraceError, match="not a finite number"):
            reward(["x"], [{"answer": 1}])


RESPONSES = [
    "",
    "\ud800",
    "\x00",
    "####",
    "#### 1e9999",
    r"\boxed{",
    "<answer>1/0</answer>",
    "Answer: " + "9" * 5000,
]


@pytest.mark.parametrize(
    "name", ["gsm8k", "last_number", "countdown", "countdown_plain", "think_format", "code_format"]
)
def test_odd_responses(name: str) -> None:
    item = {"answer": {"numbers": [1, 2], "target": 3}} if "countdown" in name else {"answer": "18"}
    for response in RESPONSES:
        sentence_or_nothing(lambda response=response: named_reward(name)([response], [item]), response)  # type: ignore[misc]


def test_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    words = [word for word in small.overrides(tmp_path) if not word.startswith("trainer.runs_dir")]
    assert main(["train", *words, f"trainer.runs_dir={tmp_path / 'file' / 'runs'}"]) == 2
    assert "file" in capsys.readouterr().err


def test_tracker_that_cannot_start_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: object) -> None:
        raise RuntimeError("No API key configured")

    tracker = types.ModuleType("wandb")
    tracker.init = refuse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    with pytest.raises(GradtraceError, match=r"wandb, which could not start: No API key.*wandb login"):
        train(small.config(tmp_path, "trainer.logger=[wandb]"))
    assert not (tmp_path / "runs" / "demo").exists()


@pytest.mark.parametrize(
    "content", ["{", "{}", '{"base_model_name_or_path": "/no/such"}', '{"base_model_name_or_path": 3}']
)
def test_damaged_adapters(tmp_path: Path, content: str) -> None:
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(GradtraceError, match=str(tmp_path)):
        load_with_adapters(tmp_path, ModelConfig(device="cpu"), trainable=False)
