"""`gradtrace verify` on the checkpoints of a real run: stored and fresh scores, resuming, the benchmark's figures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import gradtrace
from benchmarks._validity_states import Keeper
from benchmarks.validity import judge
from gradtrace import open_run
from gradtrace.cli import main
from gradtrace.commands.ablate.session import ablate, parse_grid
from gradtrace.commands.probe.config import ProbeConfig
from gradtrace.commands.probe.session import run_probe
from gradtrace.commands.verify.session import (
    STORED,
    STORED_OWN,
    Settings,
    VerifyResult,
    mini_batch_of,
    run_verify,
)
from gradtrace.config.loader import load_config, to_yaml
from gradtrace.errors import GradtraceError
from gradtrace.instruments.verify.measure import Size, slope, spearman
from gradtrace.instruments.verify.trial import BASELINE, Scores
from gradtrace.instruments.verify.verification import INFLUENCE, INFLUENCE_OWN, OWN, silent
from gradtrace.policy.optimizer import Optimizer
from gradtrace.trace.run_files import RunFiles
from gradtrace.trace.writer import TraceWriter
from gradtrace.training.checkpoint import MARKER, write_marker
from gradtrace.training.components import build_components
from gradtrace.training.host import open_instruments
from gradtrace.training.loop import Trainer
from gradtrace.training.terminal import SilentDisplay
from tests.training import small

SMALL = Size(groups=3, tokens=8, halves=6)
KNOBS = (
    *("trainer.total_steps=2", "trainer.checkpoint.every=1", "trainer.checkpoint.keep_last=0"),
    *("trainer.validation.every=0", "actor.optim.lr=1e-3", "actor.mini_batch_size=0", "rollout.n=4"),
    *("trainer.influence_trace.enable=true", "trainer.influence_trace.measure=all", "task.arithmetic.layers=2"),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of two steps with a checkpoint after each, and the state before its second update as the benchmark keeps
    it."""
    folder = tmp_path_factory.mktemp("verified")
    config = small.config(folder, *KNOBS)
    parts, kept = build_components(config), folder / "kept.pt"
    with RunFiles(folder / "run") as files:
        files.write_config(to_yaml(config))
        steps = open_instruments(parts, files, print)
        steps.add("keeper", Keeper(parts, {2: kept}, 8))
        Trainer(parts, files, SilentDisplay(), steps).fit()
    return folder / "run", kept


@pytest.fixture
def run_dir(made: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the run."""
    return Path(shutil.copytree(made[0], tmp_path / "run"))


def trusted(run_dir: Path) -> str:
    text = (run_dir / "config.yaml").read_text()
    return "reward.path=" + next(line for line in text.splitlines() if "reward.py" in line).split(": ")[1]


def sealed(checkpoint: Path) -> None:
    """The checkpoint is complete as it is now."""
    (checkpoint / MARKER).unlink()
    write_marker(checkpoint)


def verify(path: Path, *overrides: str, **settings: Any) -> VerifyResult:
    run = path if (path / "config.yaml").is_file() else path.parent.parent
    words = [trusted(run), *overrides] if (run / "config.yaml").is_file() else list(overrides)
    return run_verify(path, words, Settings(**({"size": SMALL} | settings)), silent, print)


def flat(scores: Scores, like: Scores) -> Tensor:
    return torch.cat([scores[r] for r in like])


def test_it_reproduces_the_figures_of_the_benchmark(made: tuple[Path, Path], tmp_path: Path) -> None:
    run, kept = made
    size = Size(groups=8, tokens=8, halves=0)
    found = verify(run / "checkpoints" / "step_000001", output=tmp_path / "v", size=size).verification
    benchmark = judge(kept, 0, 0, size.tokens, factors=False)
    assert benchmark is not None
    for name, margin in ((BASELINE, 1e-6), (INFLUENCE, 0.02)):  # scores are of float32 there
        for kind, place in (("token", 0), ("token_pearson", 1)):
            own = found.table[name][kind].mean
            assert own == pytest.approx(benchmark["batch"][name][place], abs=margin), (name, kind)
    assert found.books.slope == pytest.approx(slope(*torch.tensor(benchmark["books"]).T), abs=0.02)


def test_what_training_stored_is_what_is_computed_now(made: tuple[Path, Path], tmp_path: Path) -> None:
    """In nats, of all tokens of the first mini-batch, and on their own prompt."""
    found = verify(made[0] / "checkpoints" / "step_000001", output=tmp_path / "v").verification
    predictions = found.predictions
    for stored, now in ((STORED, INFLUENCE), (STORED_OWN, INFLUENCE_OWN)):
        there, here = (flat(predictions[name], predictions[now]) for name in (stored, now))
        assert spearman(there, here) > 0.98 and 0.9 < slope(there, here) < 1.1, stored


def test_the_function_has_the_results_of_the_command(made: tuple[Path, Path], tmp_path: Path) -> None:
    """`gradtrace.verify` with the model and the optimizer of a custom loop, on the same mini-batch."""
    checkpoint = made[0] / "checkpoints" / "step_000001"
    expected = verify(checkpoint, output=tmp_path / "v").verification
    config = load_config([f"resume={made[0]}", trusted(made[0])])
    model = AutoModelForCausalLM.from_pretrained(checkpoint / "policy")
    own = Optimizer(dict(model.named_parameters()), config.actor.optim, config.trainer.total_steps)
    own.load_state_tensors(load_file(checkpoint / "optimizer.safetensors"))
    own.begin_step(2)
    step = open_run(made[0]).step("influence_trace", 2)
    material = mini_batch_of(step, config)
    batch = material.batch
    assert material.weights is not None
    found = gradtrace.verify(
        model,
        own.adamw,
        prompt_ids=[batch.prompts[g] for g in batch.group.tolist()],
        response_ids=batch.response_ids,
        rewards=batch.need("rewards").tolist(),
        advantages=batch.need("advantages")[:, 0].tolist(),
        scores=[material.given[STORED][r] for r in range(len(batch))],
        grad_clip=config.actor.optim.grad_clip,
        weights=material.weights.tolist(),
        groups=SMALL.groups,
        tokens=SMALL.tokens,
        halves=SMALL.halves,
    )
    for ours, theirs in {"given scores": STORED, INFLUENCE: INFLUENCE, BASELINE: BASELINE}.items():
        for kind, values in expected.agreement[theirs].items():
            assert found.agreement[ours][kind] == pytest.approx(values, abs=1e-6), (ours, kind)


def test_the_command_prints_a_table_and_writes_a_report(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["verify", str(run_dir), trusted(run_dir), "--groups", "3", "--tokens", "8", "--halves", "6"]
    code = main([*words, "--budget", "none"])
    printed = capsys.readouterr().out
    assert "verdict" in printed and "|A|(1−p)" in printed and "stored by training step 2" in printed
    folder = run_dir / "verify" / "step_000001"  # step 2 was traced; nothing comes after checkpoint 2
    record = json.loads((folder / "report.json").read_text())
    assert code == {True: 0, False: 1, None: 3}[record["trustworthy"]]
    assert record["judged"] == STORED and record["precision"] == "float64" and record["step"] == 1
    assert record["steps_taken"] == record["steps_planned"] == 3 * (8 + 4 + 6)
    assert (folder / "report.html").read_text().count("<svg") == 4
    assert "<circle" in (folder / "predicted_vs_measured.svg").read_text()
    main([*words, "--json"])
    again = json.loads(capsys.readouterr().out)
    assert again["table"] == record["table"] and again["seconds"] < record["seconds"]  # nothing is done twice


def test_a_planted_wrong_score_of_a_run_is_reported(run_dir: Path) -> None:
    """The trace is written anew with its signs turned."""
    step = open_run(run_dir).step("influence_trace", 2)
    columns = {name: np.array(step[name]) for name in step.columns}
    columns["influence"] *= -1
    with TraceWriter(run_dir, "influence_trace") as writer:
        writer.truncate_after(1)
        writer.write(2, columns, step.meta)
    assert verify(run_dir).verification.is_trustworthy is False


def test_scores_of_another_unit_are_refused_and_fresh_ones_are_asked_about_their_own_prompt(run_dir: Path) -> None:
    step = open_run(run_dir).step("influence_trace", 2)
    columns = {name: np.array(step[name]) for name in step.columns if not name.startswith("influence")}
    columns["influence_position"] = np.array(step["influence"])
    with TraceWriter(run_dir, "influence_trace") as writer:
        writer.truncate_after(1)
        writer.write(2, columns, {**step.meta, "unit": "influence"})
    with pytest.raises(GradtraceError, match=r"scores from captured factors, whose unit is not nats .* `--fresh`"):
        verify(run_dir)
    fresh = verify(
        run_dir, "trainer.influence_trace.credit=position", "trainer.influence_trace.measure=auto", fresh=True
    )
    assert fresh.verification.judged == OWN and "its own prompt's objective" in fresh.verification.verdict


def test_fresh_scores_at_the_latest_checkpoint_and_at_a_plain_model(run_dir: Path, tmp_path: Path) -> None:
    fresh = verify(run_dir, fresh=True)
    assert fresh.folder == run_dir / "verify" / "step_000002" and fresh.facts["scores"] == "fresh"
    assert fresh.verification.judged == INFLUENCE
    again = verify(run_dir, fresh=True)
    assert again.record()["table"] == fresh.record()["table"]
    with pytest.raises(GradtraceError, match="say whose update to verify, optimizer=adamw or optimizer=sgd"):
        verify(run_dir / "policy")
    plain = verify(
        run_dir / "policy",
        *small.overrides(tmp_path, *KNOBS),
        optimizer="adamw",
        lr=1e-3,
        output=tmp_path / "plain",
    )
    assert plain.verification.steps_taken == fresh.verification.steps_taken


def as_of_verl(run_dir: Path, other: Path) -> tuple[Path, dict[int, dict[str, torch.Tensor]]]:
    """The first checkpoint of `run_dir` in verl's files, in the run `other`: the folder with them, and the optimizer's
    state (here of one worker; tests/integrations/verl has those of two)."""
    source = run_dir / "checkpoints" / "step_000001"
    actor = other / "checkpoints" / "global_step_1" / "actor"
    model = AutoModelForCausalLM.from_pretrained(source / "policy")
    shutil.copytree(source / "policy", actor / "huggingface")
    torch.save(model.state_dict(), actor / "model_world_size_1_rank_0.pt")
    moments = load_file(source / "optimizer.safetensors")
    state = {
        index: {key: moments[f"{key}/{name}"] for key in ("step", "exp_avg", "exp_avg_sq")}
        for index, (name, _) in enumerate(model.named_parameters())
    }
    torch.save({"state": state, "param_groups": []}, actor / "optim_world_size_1_rank_0.pt")
    (other / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1")
    shutil.copy(run_dir / "config.yaml", other)
    shutil.copytree(run_dir / "influence_trace", other / "influence_trace")
    return actor, state


def test_probe_and_ablate_open_a_checkpoint_of_verl_as_the_embedded_loops(run_dir: Path, tmp_path: Path) -> None:
    as_of_verl(run_dir, tmp_path / "verl")
    ours, theirs = run_dir / "checkpoints" / "step_000001", tmp_path / "verl"
    knobs = ProbeConfig(evaluation_prompts=4, update_prompts=4, update_n=3, eta=[1.0], fresh=False)
    found = [
        run_probe(path, knobs, [trusted(run_dir)], tmp_path / f"probe_{number}")
        for number, path in enumerate((ours, theirs, theirs / "checkpoints" / "global_step_1"))
    ]
    for probed in found[1:]:
        assert probed.prediction.change.value == found[0].prediction.change.value != 0.0
        assert torch.equal(probed.shares.tokens, found[0].shares.tokens)
    swept = ["sweep.influence.projection_dim_factor=1,4", "trainer.influence_trace.credit=position"]
    grid = parse_grid([*small.overrides(tmp_path, *KNOBS), "trainer.influence_trace.measure=auto", *swept])
    for number, path in enumerate((ours, theirs)):
        ablate(grid, tmp_path / f"ablation_{number}", path, repeat=1)
    cells = [sorted((tmp_path / f"ablation_{number}" / "cells").iterdir()) for number in (0, 1)]
    assert [cell.name for cell in cells[0]] == [cell.name for cell in cells[1]] and len(cells[0]) == 2
    for one, other in zip(*cells, strict=True):
        with np.load(one) as first, np.load(other) as second:
            assert np.array_equal(first["influence_position"], second["influence_position"])


def test_a_checkpoint_of_verl_is_that_of_the_embedded_loop(run_dir: Path, tmp_path: Path) -> None:
    expected, other = verify(run_dir), tmp_path / "verl"
    actor, state = as_of_verl(run_dir, other)
    for path in (other, other / "checkpoints" / "global_step_1"):
        found = verify(path, trusted(run_dir))
        assert found.facts["scores"] == "stored by training step 2, its first mini-batch"
        assert found.record()["table"] == expected.record()["table"]
    with pytest.raises(GradtraceError, match=r"no complete checkpoint of step 7; it has \[1\]"):
        verify(other / "checkpoints" / "global_step_7")
    del state[0]
    shutil.rmtree(other / "checkpoints" / "step_000001")
    torch.save({"state": state, "param_groups": []}, actor / "optim_world_size_1_rank_0.pt")
    with pytest.raises(GradtraceError, match="LoRA adapters are merged into it"):
        verify(other)


def test_a_report_of_nothing_yet_is_written(run_dir: Path) -> None:
    record = verify(run_dir, budget=0.0).write()
    assert record["trustworthy"] is None and record["steps_taken"] == 0 and record["books"]["slope"] is None


def test_the_run_is_not_changed(run_dir: Path) -> None:
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    verify(run_dir)
    assert all(path.read_bytes() == content for path, content in before.items())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--budget", "soon"], "--budget soon: a time is needed"),
        (["--budget=-3s"], "--budget -3s: a time is needed"),
        (["--groups", "0"], "--groups 0: it is at least 1"),
        (["optimizer=adagrad"], "it can be checkpoint, adamw or sgd"),
        (["lr=fast"], "a learning rate is a number"),
        (["trainer.influence_trace.credits=position"], "trainer.influence_trace.credit"),
    ],
)
def test_bad_words_are_answered_in_words(
    made: tuple[Path, Path], words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(made[0]), *words]) == 2
    assert sentence in capsys.readouterr().err


def test_what_cannot_be_verified_is_refused(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(GradtraceError, match="there is no such folder"):
        verify(tmp_path / "nowhere")
    with pytest.raises(GradtraceError, match="is no checkpoint and no run with one"):
        verify(tmp_path)
    checkpoint = run_dir / "checkpoints" / "step_000002"
    (checkpoint / "optimizer.safetensors").unlink()
    sealed(checkpoint)
    with pytest.raises(GradtraceError, match="has no optimizer state"):
        verify(checkpoint)


def test_weights_that_were_saved_in_bf16_are_measured_in_float32(run_dir: Path) -> None:
    checkpoint = run_dir / "checkpoints" / "step_000001"
    weights = load_file(checkpoint / "policy" / "model.safetensors")
    save_file(
        {name: value.bfloat16() for name, value in weights.items()},
        checkpoint / "policy" / "model.safetensors",
        {"format": "pt"},
    )
    sealed(checkpoint)
    found = verify(checkpoint, precision="float32")
    assert found.facts["precision"] == "float32"
    assert all(any(value != 0 for value, _ in e.measured) for e in found.verification.effects)
