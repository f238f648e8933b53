"""`gradtrace trace import`: rollouts of other programs become runs, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from playwright.sync_api import expect

import gradtrace
from gradtrace.cli import main
from gradtrace.commands.doctor.health import examine
from gradtrace.tasks.arithmetic import ArithmeticTask
from gradtrace.tasks.datasets import encode
from gradtrace.tasks.settings import ArithmeticConfig
from gradtrace.trace.reader import RunReader
from gradtrace.viewer.scores import load_step
from tests.tasks.byte_model import byte_tokenizer, save_byte_model
from tests.viewer.serving import Watched, chromium, serving

STORED = Path(__file__).parent / "rollouts"
TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("model"))


def ids(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


def plain_rows() -> list[dict[str, Any]]:
    """Two steps of two prompts with two answers, one with token ids and log-probs, texts and messages."""
    rows = []
    for step in (3, 4):
        for prompt in ("1+1=", "2+2="):
            for answer in ("2", "4!"):
                row = {
                    "step": step,
                    "prompt": prompt,
                    "response": answer,
                    "reward": float(answer == "2"),
                    "answer": "2",
                }
                rows.append({**row, "response_ids": ids(answer), "log_probs": [-0.5] * len(answer), "colour": "red"})
    return rows


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def imported(source: Path, model: Path, *words: str) -> RunReader:
    run = source.with_name(f"{source.stem}-run")
    assert main(["trace", "import", str(source), str(run), "--tokenizer", str(model), *words]) == 0
    return gradtrace.open_run(run)


def texts(run: RunReader, step: int) -> list[tuple[str, str, float]]:
    """(prompt, response, reward) of every response, as the files have them."""
    trace = run.step("entropy_trace", step)
    prompts = [TOKENIZER.decode(trace.group(g).prompt_ids) for g in range(trace.n_groups)]
    own = (TOKENIZER.decode(trace.tokens(r)["token_id"]) for r in range(trace.n_responses))
    rewards = trace["reward"].tolist()
    return [(prompts[g], text, reward) for g, text, reward in zip(trace["group"], own, rewards, strict=True)]


def test_plain_rows_become_groups_by_prompt_with_the_samplers_numbers(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = imported(write(tmp_path / "rows.jsonl", plain_rows()), model)
    assert run.steps("entropy_trace") == [3, 4] and run.verify() == []
    found = texts(run, 4)
    assert found == [("1+1=", "2", 1), ("1+1=", "4!", 0), ("2+2=", "2", 1), ("2+2=", "4!", 0)]
    trace = run.step("entropy_trace", 4)
    assert trace["accepted"].tolist() == [True, False, True, False]
    np.testing.assert_array_equal(trace["sampler_log_prob"], np.full(6, -0.5, np.float32))
    assert "entropy" not in trace and trace.meta["format"] == "jsonl"
    assert [row["critic/rewards/mean"] for row in run.metrics()[0]] == [0.5, 0.5]
    assert "colour" in capsys.readouterr().out, "a column that is not read is named"
    assert not [finding for finding in examine(run) if finding.is_problem]


def test_an_imported_run_opens_in_the_viewer_and_the_trace_commands(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = imported(write(tmp_path / "rows.jsonl", plain_rows()), model)
    view = load_step(run, 3)
    assert view is not None and view.n_groups == 2 and view.column("entropy") is None
    for words in (["ls", str(run.path), "--verify"], ["show", str(run.path), "--color", "never"]):
        assert main(["trace", *words]) == 0
    assert "'!'" in capsys.readouterr().out
    assert main(["trace", "export", str(run.path), str(tmp_path / "all.parquet")]) == 0
    assert pyarrow.parquet.read_table(tmp_path / "all.parquet").num_rows == 12
    assert main(["doctor", str(run.path)]) == 0
    assert main(["report", str(run.path), "-o", str(tmp_path / "report.html")]) == 0


def test_the_pages_of_an_imported_run_show_its_tokens(model: Path, tmp_path: Path) -> None:
    run = imported(write(tmp_path / "rows.jsonl", plain_rows()), model)
    with chromium() as browser, serving([run.path]) as address:
        watched = Watched(browser.new_page(viewport={"width": 1440, "height": 900}), address)
        page = watched.open("#/run")
        expect(page.locator("h1").first).to_be_visible()
        watched.open("#/step?step=3")
        expect(page.locator("h1")).to_contain_text("Step 3")
        watched.open("#/group?step=3&group=1")
        expect(page.get_by_role("region", name="Response r1, rejected")).to_contain_text("4!")
        assert watched.errors == []


def test_verls_dump_is_recognised_and_its_prompts_are_restored(model: Path, tmp_path: Path) -> None:
    data = write(
        tmp_path / "train.jsonl",
        [{"prompt": [{"role": "user", "content": f"{a}+{b}?"}]} for a in (1, 2) for b in (0, 1)],
    )
    source = tmp_path / "verl"
    source.symlink_to(STORED / "verl")
    run = imported(source, model, "--prompts", str(data), "--append-end")
    trace = run.step("entropy_trace", 2)
    assert run.steps("entropy_trace") == [1, 2] and trace.meta["format"] == "verl"
    assert trace.group(1).prompt_ids.tolist() == encode(TOKENIZER, [{"role": "user", "content": "2+1?"}])
    rows = [json.loads(line) for line in (STORED / "verl" / "2.jsonl").read_text().split("\n") if line]
    assert trace["reward"].tolist() == [row["score"] for row in rows]
    first = trace.tokens(0)["token_id"].tolist()
    assert TOKENIZER.decode(first[:-1]) == rows[0]["output"] and first[-1] == TOKENIZER.eos_token_id
    prompts = [json.loads(line) for line in (run.path / "prompts.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in prompts] == ["1", "2", "2", "3"]


def test_trls_table_has_its_rewards_added_up_with_their_weights(model: Path, tmp_path: Path) -> None:
    source = tmp_path / "trl"
    source.symlink_to(STORED / "trl")
    run = imported(source, model, "--reward-columns", "ones=2,short")
    rows = pyarrow.parquet.read_table(STORED / "trl" / "completions_00001.parquet").to_pylist()
    trace = run.step("entropy_trace", 1)
    assert trace.meta["format"] == "trl" and trace.n_responses == len(rows) == 8
    order = {prompt: place for place, prompt in enumerate(dict.fromkeys(row["prompt"][0]["content"] for row in rows))}
    rows.sort(key=lambda row: order[row["prompt"][0]["content"]])
    np.testing.assert_allclose(trace["reward"], [2 * row["ones"] + row["short"] for row in rows])
    np.testing.assert_allclose(trace["advantage"], [row["advantage"] for row in rows], rtol=1e-6)
    assert trace.group(0).prompt_ids.tolist() == encode(TOKENIZER, rows[0]["prompt"])


def prime_row(prompt: str, response: str, reward: float | None, **more: Any) -> dict[str, Any]:
    """A record of the token export, schema 1: every list has a number for every token of prompt and response."""
    tokens, n = ids(prompt + response), len(prompt)
    lists: dict[str, list[Any]] = {
        "token_ids": tokens,
        "position_ids": list(range(len(tokens))),
        "loss_mask": [i >= n for i in range(len(tokens))],
        "advantages": [0.5 if reward else -0.5] * len(tokens),
        "rewards": [reward] * len(tokens),
        "inference_logprobs": [0.0] * n + [-1.0] * (len(tokens) - n),
        "trainer_logprobs": [-5.0] * n + [-1.25] * (len(tokens) - n),
        "entropy": [5.0] * n + [0.75] * (len(tokens) - n),
        "is_masked": [False] * len(tokens),
    }
    about = {
        "schema_version": 1,
        "step": 7,
        "rank": 0,
        "micro_step": 0,
        "env_name": "sums",
        "training_mode": "rl",
    }
    return {**about, **lists, **more}


def test_prime_rls_tokens_are_cut_at_the_mask_and_keep_both_log_probs(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "token_exports" / "step_7"
    folder.mkdir(parents=True)
    write(folder / "rank_0.jsonl", [prime_row("1+1=", "2", 1.0), prime_row("2+2=", "4", None)])
    write(folder / "rank_1.jsonl", [prime_row("1+1=", "33", 0.0)])
    run = imported(tmp_path / "token_exports", model)
    trace = run.step("entropy_trace", 7)
    assert texts(run, 7) == [("1+1=", "2", 1), ("1+1=", "33", 0), ("2+2=", "4", -0.5)]
    for name, value in (("sampler_log_prob", -1), ("log_prob", -1.25), ("entropy", 0.75)):
        np.testing.assert_array_equal(trace[name], np.full(4, value, np.float32))


def test_a_mask_with_gaps_becomes_turns(model: Path, tmp_path: Path) -> None:
    gaps = {"loss_mask": [False] * 4 + [True, False, False, True]}
    rows = [prime_row("1+1=", "2ok3", 1.0, **gaps), prime_row("1+1=", "5", 0.0)]
    run = imported(write(tmp_path / "rank_0.jsonl", rows), model)
    trace = run.step("entropy_trace", 7)
    assert trace["loss_mask"].tolist() == [True, False, False, True, True]
    assert [(part.start, part.role) for part in trace.segments(0)] == [
        (0, "assistant"),
        (1, "environment"),
        (3, "assistant"),
    ]
    assert np.isfinite(trace["entropy"]).tolist() == trace["loss_mask"].tolist()


BAD = [
    ("not json\n", "is not valid JSON"),
    ("[1]\n", "is no JSON object"),
    ({"prompt": "a", "response": "b"}, "has no reward"),
    ({"prompt": "a", "response": "b", "reward": float("nan")}, "not a finite number"),
    ({"prompt": "a", "response": "", "reward": 1}, "response has no tokens"),
    ({"prompt": 3, "response": "b", "reward": 1}, "neither a text nor a list of messages"),
    ({"prompt": "a", "response_ids": [1, 10**6], "reward": 1}, "token id 1000000"),
    ({"prompt": "a", "response_ids": [1, -1], "reward": 1}, "no list of token ids"),
    ({"prompt": "a", "response": "bc", "reward": 1, "log_probs": [-1.0]}, "give response_ids"),
    ({"prompt": "a", "response_ids": [1, 2], "reward": 1, "log_probs": [-1.0]}, "1 numbers, the response 2"),
    ({"prompt": "a", "response": "b", "reward": 1, "step": "x"}, "not a number of a step"),
    ({**prime_row("a", "bcd", 1.0), "loss_mask": [False, True, False, True]}, "has no prompt"),
]


@pytest.mark.parametrize(("row", "why"), BAD, ids=[why for _, why in BAD])
def test_a_bad_row_is_named_with_its_line_and_nothing_is_written(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], row: Any, why: str
) -> None:
    source = write(tmp_path / "rows.jsonl", [*plain_rows()[:2], row])
    words = ["trace", "import", str(source), str(tmp_path / "run"), "--tokenizer", str(model)]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert f"{source}:3: " in said and why in said, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"], "nothing half-written is left"
    assert main([*words, "--skip-bad"]) == 0
    assert f"{source}:3" in capsys.readouterr().out.replace("\n", "")
    assert len(texts(gradtrace.open_run(tmp_path / "run"), 3)) == 2
    assert f"{source}:3" in (tmp_path / "run" / "run.log").read_text(), "what was left out is in the run's log"


REFUSED = [
    ([{"question": "a", "reply": "b"}], [], "no known format"),
    ([{"prompt": prompt, "response": "b", "reward": 1, "group": 1} for prompt in "ab"], [],
     "rows.jsonl:2: its group '1' has another prompt at"),
    (plain_rows(), ["--reward", "no_such"], "no_such"),
    (plain_rows(), ["--temperature", "0"], "temperature"),
    ([], [], "no rows"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "words", "why"), REFUSED, ids=[why for _, _, why in REFUSED])
def test_what_cannot_be_imported_is_refused_with_the_reason(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: Any, words: list[str], why: str
) -> None:
    source = write(tmp_path / "rows.jsonl", rows)
    assert main(["trace", "import", str(source), str(tmp_path / "run"), "--tokenizer", str(model), *words]) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_text_that_the_tokenizer_does_not_know_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ArithmeticTask(ArithmeticConfig(), 0).tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"prompt": "1+1=", "response": answer, "reward": 0} for answer in ("2", "two")]
    imported(write(tmp_path / "rows.jsonl", rows), tmp_path / "model")
    assert "1 rows have text that the tokenizer does not know" in capsys.readouterr().out


def test_a_run_that_is_there_is_not_touched(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "rows.jsonl", plain_rows())
    (tmp_path / "run").mkdir()
    assert main(["trace", "import", str(source), str(tmp_path / "run"), "--tokenizer", str(model)]) == 2
    assert "is there already" in capsys.readouterr().err and not list((tmp_path / "run").iterdir())
    assert main(["trace", "import", str(source), str(tmp_path / "new")]) == 2
    assert "--tokenizer is missing" in capsys.readouterr().err


def test_blame_says_what_can_be_asked_about_an_imported_run(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = imported(write(tmp_path / "rows.jsonl", plain_rows()), model)
    assert main(["blame", str(run.path)]) != 0
    assert "it was imported" in capsys.readouterr().err
