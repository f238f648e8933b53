"""`gradtrace eval`: scores follow from the responses saved, intervals cover, comparisons are paired and fair."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy
import pytest

from gradtrace import open_run
from gradtrace.cli import main
from gradtrace.commands.eval.evaluation import (
    Result,
    Settings,
    compare,
    estimate,
    load_result,
    paired,
    pass_rates,
    save,
    summarise,
)
from gradtrace.errors import GradtraceError
from gradtrace.tasks.prepare.prepare import Request, prepare
from tests.tasks.byte_model import save_byte_model

REWARD = """
def vowels(response, item):
    return float(sum(letter in "aeiou" for letter in response) >= 1)
"""


def result(rewards: list[list[float]], **settings: Any) -> Result:
    lines = [
        {"key": str(i), "prompt": str(i), "response": "", "reward": value, "length": 1, "finished": True}
        for i, row in enumerate(rewards)
        for value in row
    ]
    return Result(Settings("gsm8k", **{"n": len(rewards[0]), **settings}), "model", "file", lines)


def test_pass_at_k_is_the_mean_over_all_choices_of_k_responses() -> None:
    rewards = [[1.0, 0.0, 0.0, 1.0, 0.0], [0.0] * 5, [1.0] * 5]
    for k in (1, 2, 3, 5):
        chosen = [[max(c) for c in itertools.combinations(row, k)] for row in rewards]
        assert pass_rates(rewards, k) == pytest.approx([sum(c) / len(c) for c in chosen])


def test_thirty_of_thirty_right_is_not_certainty() -> None:
    found = estimate(numpy.ones(30))
    assert found.mean == found.high == 1.0 and 0.8 < found.low < 0.92
    assert 0 < paired(numpy.ones(30), numpy.ones(30)).difference.high < 0.1


def test_rewards_on_another_scale_have_an_interval_on_it() -> None:
    found = estimate(numpy.array([-3.0, 5.0, 4.0, 2.0]))
    assert found.low < -1 and found.high > 4


def test_paired_difference_sees_what_separate_intervals_do_not() -> None:
    generator = numpy.random.default_rng(1)
    base = generator.random(100)
    better = base + 0.02
    assert estimate(base).high > estimate(better).low
    pair = paired(base, better)
    assert pair.difference.excludes_zero and pair.difference.mean == pytest.approx(0.02)
    assert (pair.better, pair.worse, pair.equal) == (100, 0, 0)
    assert not paired(base, base).difference.excludes_zero


def test_saved_evaluation_is_read_back_and_compared_with_its_sign(tmp_path: Path) -> None:
    worse, better = result([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]]), result([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
    _, summary = summarise(worse, [1, 2])
    save(tmp_path / "a", worse, summary)
    assert load_result(tmp_path / "a") == worse
    change = compare(load_result(tmp_path / "a"), better, [2])
    assert change["mean@2"].difference.mean == pytest.approx(5 / 6)
    assert change["pass@2"].better == 2 and change["pass@2"].equal == 1
    assert compare(better, worse, [1])["mean@2"].difference.mean == pytest.approx(-5 / 6)


def test_unlike_evaluations_are_not_compared() -> None:
    one = result([[1.0], [0.0]])
    with pytest.raises(GradtraceError, match=r"temperature is 1\.0 in one and 0\.5 in the other"):
        compare(one, result([[1.0], [0.0]], temperature=0.5), [1])
    with pytest.raises(GradtraceError, match="1 in the second only"):
        compare(one, result([[1.0], [0.0], [0.0]]), [1])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return save_byte_model(folder / "a", 0), save_byte_model(folder / "b", 1)


def test_command_evaluates_saves_and_compares(
    tmp_path: Path,
    models: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    prepare(Request("countdown", tmp_path / "data" / "countdown", numbers=(2,), count=30, largest=9, validation=6))
    words = [
        "--task",
        "countdown",
        "--n",
        "3",
        "--k",
        "1",
        "3",
        "--max-new-tokens",
        "12",
        "--reward",
        "reward.py:vowels",
    ]
    assert main(["eval", str(models[0]), *words, "--against", str(models[1]), "--output", "out"]) == 0
    printed = capsys.readouterr().out
    assert "pass@3" in printed and "B − A" in printed and "6 problems × 3" in printed
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "out" / "responses.jsonl").read_text().splitlines()]
    assert len(lines) == 18 and summary["problems"] == 6
    assert summary["scores"]["mean@3"]["value"] == pytest.approx(sum(line["reward"] for line in lines) / 18)
    assert all(line["reward"] == float(any(v in line["response"] for v in "aeiou")) for line in lines)

    other = next((tmp_path / "evals").iterdir())
    assert main(["eval", "compare", str(other), "out"]) == 0
    # the same again: the same responses, whatever else was sampled in between
    assert main(["eval", str(models[0]), *words, "--output", "again"]) == 0
    assert (tmp_path / "again" / "responses.jsonl").read_text() == (tmp_path / "out" / "responses.jsonl").read_text()


def test_original_data_gets_the_same_prompts_as_prepared_data(tmp_path: Path, models: tuple[Path, Path]) -> None:
    from gradtrace.commands.eval.evaluation import load_prompts
    from tests.tasks.byte_model import byte_tokenizer

    rows = [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(6)]
    (tmp_path / "g.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare(Request("gsm8k", tmp_path / "p", str(tmp_path / "g.jsonl"), validation=2))
    tokenizer = byte_tokenizer()
    original = {tuple(p.ids): p.item["answer"] for p in load_prompts("gsm8k", str(tmp_path / "g.jsonl"), tokenizer)}
    prepared = load_prompts("gsm8k", str(tmp_path / "p" / "validation.parquet"), tokenizer)
    assert len(prepared) == 2 and all(original[tuple(p.ids)] == p.item["answer"] for p in prepared)
    assert tokenizer.decode(prepared[0].ids).startswith("<|user|>What is")
    with pytest.raises(GradtraceError, match="is prepared"):
        load_prompts("gsm8k", str(tmp_path / "p" / "validation.parquet"), tokenizer, instruction="!")


def model_of(name: str) -> str:
    return str(open_run(name).checkpoint().weights)


def test_runs_checkpoints_folders_and_hub_names_are_understood(tmp_path: Path) -> None:
    from gradtrace.training.checkpoint import Checkpoints

    def fill(folder: Path) -> None:
        (folder / "policy").mkdir()
        (folder / "policy" / "config.json").write_text("{}")

    run = tmp_path / "run"
    step = Checkpoints(run).save(3, fill)
    assert model_of(str(step)) == model_of(str(run)) == str(step / "policy")
    (run / "policy").mkdir()
    assert model_of(str(run)) == str(run / "policy")
    assert model_of(str(step / "policy")) == str(step / "policy")
    assert model_of("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
    (tmp_path / "empty").mkdir()
    for name, words in (("empty", "no model"), ("nowhere/at/all", "no such folder")):
        with pytest.raises(GradtraceError, match=words):
            model_of(str(tmp_path / name))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x"], "--task"),
        (["compare", "a"], "compare A B"),
        (["compare", "a", "b"], "not the result of an evaluation"),
        (["x", "--task", "countdown"], "gradtrace data prepare countdown"),
        (["x", "--task", "gsm8k", "--k", "9"], "pass@9"),
    ],
)
def test_mistakes_are_named(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", *words]) == 2
    assert message in capsys.readouterr().err


def test_adapters_are_evaluated_on_their_base(tmp_path: Path, models: tuple[Path, Path]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from tests.tasks.byte_model import byte_tokenizer

    peft = pytest.importorskip("peft", reason="the optional package peft is not installed")
    base = AutoModelForCausalLM.from_pretrained(models[0])
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    byte_tokenizer().save_pretrained(tmp_path / "adapter")
    tokens = torch.tensor([[5, 6, 7]])
    loaded = open_run(tmp_path / "adapter").policy(precision="float32").model(tokens).logits
    assert torch.allclose(loaded, model.eval()(tokens).logits, atol=1e-5)
    with model.disable_adapter():
        assert not torch.allclose(loaded, model(tokens).logits, atol=1e-2)
