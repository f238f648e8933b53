"""`gradtrace trace`: what people see."""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest
from tokenizer_families import FAMILIES
from trace_fakes import entropy_columns, influence_columns

import gradtrace
from gradtrace.commands import trace as command
from gradtrace.errors import GradtraceError
from gradtrace.trace.columns import KINDS, SchemaError
from gradtrace.trace.safe_npz import SafeNpz, UnsafeNpzError
from gradtrace.trace.step import Step
from gradtrace.trace.token_text import Flag, Rules, TokenBytes, visible
from gradtrace.trace.writer import TraceWriter


def trace(*words: Any) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(word) for word in words]))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    with TraceWriter(folder, "influence_trace") as writer:
        for step in (1, 2, 3):
            writer.write(step, {**influence_columns(step), "token_id": influence_columns(step)["token_id"] % 20})
    with TraceWriter(folder, "entropy_trace") as writer:
        writer.write(1, {**entropy_columns(1), "token_id": entropy_columns(1)["token_id"] % 20})
    TokenBytes.from_tokenizer(FAMILIES["characters"](tmp_path)).save(folder / "token_bytes.npz")
    return folder


def test_ls_lists_every_step_of_every_trace(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trace("ls", run, "--verify") == 0
    shown = capsys.readouterr().out
    assert "influence_trace" in shown
    assert "entropy_trace" in shown
    assert "sha256 is right" in shown
    assert trace("ls", run, "--kind", "entropy_trace") == 0
    assert "influence_trace" not in capsys.readouterr().out


def test_a_run_is_found_by_its_name(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trace("ls", "run", "--runs-dir", tmp_path) == 0
    assert trace("export", "run", tmp_path / "tokens.csv", "--runs-dir", tmp_path) == 0
    assert trace("show", "run", "--runs-dir", tmp_path) == 0
    by_name = capsys.readouterr().out
    trace("show", run)
    assert by_name.endswith(capsys.readouterr().out)
    with pytest.raises(GradtraceError, match=f"no run at rum nor at .*; {tmp_path} has run"):
        trace("show", "rum", "--runs-dir", tmp_path)


def test_what_a_notebook_prints_and_completes(run: Path) -> None:
    opened = gradtrace.open_run(run)
    assert f"{opened.path}'" in repr(opened) and "influence_trace: 3 steps, 1 to 3" in repr(opened)
    assert "entropy" in opened.step("influence_trace", 2)._ipython_key_completions_()
    shown = gradtrace.show(opened)
    assert len(repr(shown)) < 100 and "steps" in repr(shown) and "<iframe" in shown._repr_html_()
    assert {"open_run", "show", "record", "verify"} <= set(dir(gradtrace))
    (run / "influence_trace/steps/step_000002.npz").write_bytes(b"no")
    opened.verify()
    assert repr(opened).endswith("; 1 problems)")


def test_ls_names_a_damaged_step_and_fails(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "influence_trace/steps/step_000002.npz").write_bytes(b"no")
    assert trace("ls", run, "--verify") == 1
    assert "influence_trace/steps/step_000002.npz" in capsys.readouterr().out


def test_show_prints_every_token_of_the_group_with_its_score(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trace("show", run, "--step", 2, "--group", 1) == 0
    lines = capsys.readouterr().out.splitlines()
    step = gradtrace.open_run(run).step("influence_trace", 2)
    token_bytes = gradtrace.open_run(run).token_bytes
    assert token_bytes is not None
    for r in step.group(1).responses:
        start = 1 + next(i for i, line in enumerate(lines) if line.startswith(f"response {r} "))
        tokens = step.tokens(r)
        for i, (token_id, score) in enumerate(zip(tokens["token_id"], tokens["influence"], strict=True)):
            index, shown_score, *_, text = lines[start + 1 + i].split()
            assert int(index) == i
            assert float(shown_score.replace("−", "-")) == pytest.approx(score, abs=0.005)
            if token_bytes.decode([token_id]).strip():
                assert text == repr(token_bytes.decode([token_id], continues=True))
    assert "training on the token raised the objective" in " ".join(" ".join(lines).split())


def test_show_colours_on_request_and_its_text_stays_whole(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trace("show", run, "--color", "always", "--by", "entropy") == 0
    shown = capsys.readouterr().out
    assert "\x1b[" in shown
    trace("show", run, "--color", "never")
    assert "\x1b[" not in capsys.readouterr().out


def test_show_says_why_a_group_was_skipped(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace("show", run, "--group", 2)
    shown = capsys.readouterr().out
    assert "constant_reward" in shown
    assert "no response" in shown


def test_show_begins_a_group_with_its_books_and_what_its_scores_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = influence_columns() | {
        "influence": 1e-5 * influence_columns()["influence"],
        "objective_change": [2e-4, np.nan, np.nan],
        "change_by_batch": [1.5e-4, np.nan, np.nan],
        "change_by_own": [1e-4, np.nan, np.nan],
        "change_by_momentum": [5e-5, np.nan, np.nan],
    }
    update = {"optimizer_step": 0, "part": 1e-4, "second_moment": "batch_gradient", "learning_rate": 1e-4}
    with TraceWriter(tmp_path, "influence_trace", on_error="raise") as writer:
        writer.write(1, columns, {"updates": [update]})
    for group, wanted in (
        (0, "raised the group's objective by 0.200 m-nats: 0.100 by its own tokens, 0.050 by other prompts"),
        (1, "This group was not measured"),
    ):
        assert trace("show", tmp_path, "--group", group, "--color", "never") == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert wanted in shown and "because Adam's state was empty" in shown
        assert "influence, m-nats entropy log_prob token" in shown or "influence, µ-nats" in shown
        assert re.search(r"· Σ [+−][0-9.]+ [mµ]-nats", shown)


def test_show_works_without_token_texts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "token_bytes.npz").unlink()
    trace("show", run)
    assert "[0][1][2]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", 99], "no step 99"),
        (["--group", 9], "groups 0 to 2"),
        (["--by", "reward"], "influence_own"),
        (["--kind", "tracin"], "no steps"),
    ],
)
def test_show_says_what_there_is_instead(words: list[Any], message: str, run: Path) -> None:
    with pytest.raises(GradtraceError, match=message):
        trace("show", run, *words)


def test_tokens_cannot_command_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "\x1b" not in visible("\x1b]0;evil\x07\x9b31m‮")
    tokens = TokenBytes([b"\x1b]0;evil\x07", b"[red]"] * 500, [int(Flag.SPECIAL)] * 1000, Rules())
    with TraceWriter(tmp_path, "influence_trace") as writer:
        writer.write(1, influence_columns())
    tokens.save(tmp_path / "token_bytes.npz")
    trace("show", tmp_path, "--color", "never")
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "evil" in shown


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_export_has_every_token_once_with_its_text(suffix: str, run: Path, tmp_path: Path) -> None:
    target = tmp_path / f"tokens{suffix}"
    assert trace("export", run, target) == 0
    table = pyarrow.parquet.read_table(target) if suffix == ".parquet" else pyarrow.csv.read_csv(target)
    opened = gradtrace.open_run(run)
    steps = [opened.step("influence_trace", number) for number in (1, 2, 3)]
    assert table.num_rows == sum(step.n_tokens for step in steps)
    frame = table.to_pandas()
    for step in steps:
        part = frame[frame.step == step.step]
        assert np.allclose(part.influence, step["influence"])
        assert set(part.selection) == {"selected"}
        assert part.position.max() == step["length"].max() - 1
    assert opened.token_bytes is not None
    first = steps[0].tokens(0)["token_id"]
    assert frame.text[0] == opened.token_bytes.texts(first, continues=True)[0].text


@pytest.mark.parametrize(("wanted", "steps"), [("2:", {2, 3}), (":2", {1, 2}), ("2", {2}), ("1:1", {1})])
def test_export_takes_a_range_of_steps(wanted: str, steps: set[int], run: Path, tmp_path: Path) -> None:
    trace("export", run, tmp_path / "t.parquet", "--steps", wanted)
    assert set(pyarrow.parquet.read_table(tmp_path / "t.parquet")["step"].to_pylist()) == steps


def test_export_fills_columns_that_a_step_lacks_with_nulls(run: Path, tmp_path: Path) -> None:
    columns = influence_columns(4)
    del columns["influence_own"]
    with TraceWriter(run, "influence_trace") as writer:
        writer.write(4, columns)
    trace("export", run, tmp_path / "t.parquet")
    frame = pyarrow.parquet.read_table(tmp_path / "t.parquet").to_pandas()
    assert frame[frame.step == 4].influence_own.isna().all()
    assert frame[frame.step != 4].influence_own.notna().all()


def test_export_reports_what_it_left_out_and_leaves_no_half_file(run: Path, tmp_path: Path) -> None:
    (run / "influence_trace/steps/step_000002.npz").write_bytes(b"no")
    assert trace("export", run, tmp_path / "t.parquet") == 1
    assert set(pyarrow.parquet.read_table(tmp_path / "t.parquet")["step"].to_pylist()) == {1, 3}
    with pytest.raises(GradtraceError, match="must end in"):
        trace("export", run, tmp_path / "t.xlsx")
    with pytest.raises(GradtraceError, match="none of these steps"):
        trace("export", run, tmp_path / "u.csv", "--steps", "50:")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "t.parquet"]


def test_import_then_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = np.empty(2, dtype=object)
    prompts[:] = [[1, 2], [1, 2]]
    (tmp_path / "old").mkdir()
    np.savez(
        tmp_path / "old" / "step_5.npz",
        responses=np.array([[3, 4], [5, 0]]),
        response_mask=np.array([[1, 1], [1, 0]]),
        influence=np.array([[0.5, -0.25], [1, 0]]),
        entropies=np.ones((2, 2)),
        reward=np.array([0.0, 1.0]),
        accepted=np.array([False, True]),
        group_id=np.array([0, 0]),
        prompt_ids=prompts,
    )
    (tmp_path / "old" / "step_6.npz").write_bytes(b"no")
    assert trace("import", tmp_path / "old", tmp_path / "new") == 1
    shown = capsys.readouterr().out
    assert "1 steps imported" in shown
    assert "refused  step_6.npz" in shown
    assert trace("show", tmp_path / "new") == 0
    assert "[3]" in capsys.readouterr().out


def test_help_shows_examples() -> None:
    assert command.__doc__ is not None
    assert "gradtrace trace show" in command.__doc__


def test_show_of_responses_that_have_scores_while_their_tokens_have_none(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = entropy_columns(1)
    kept = {name: columns[name] for name in columns if name in KINDS["tracin"].required}
    responses = len(columns["reward"])
    scores = {"score": np.linspace(-1, 1, responses, dtype=np.float32), "kept": np.ones(responses, bool)}
    with TraceWriter(run, "tracin", on_error="raise") as writer:
        writer.write(1, {**kept, **scores, "reason": np.zeros(responses, np.uint8)})
    assert trace("show", run, "--kind", "tracin") == 0
    assert "score -1 " in capsys.readouterr().out
    with pytest.raises(GradtraceError, match="cannot colour by 'entropy'; tracin has scores of responses alone"):
        trace("show", run, "--kind", "tracin", "--by", "entropy")


@pytest.mark.parametrize(
    "version",
    [np.array([2**31 - 1], np.int32), np.array(["x"]), np.array([np.nan]), np.zeros(2), np.array([[1]])],
)
def test_strange_format_versions_are_refused_in_words(run: Path, version: Any) -> None:
    with np.load(run / "entropy_trace/steps/step_000001.npz") as arrays:
        content = dict(arrays)
    file = io.BytesIO()
    np.savez(file, **{**content, "format_version": version})
    with pytest.raises((SchemaError, UnsafeNpzError)):
        Step("entropy_trace", 1, SafeNpz(file.getvalue()))
