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
from transformers import AutoModelForCausalLM

import gradtrace
from benchmarks._validity_states import Keeper
from benchmarks.validity import Score, judge
from gradtrace import open_run
from gradtrace.cli import main
from gradtrace.commands.ablate.session import ablate, parse_grid
from gradtrace.commands.probe.config import ProbeConfig
from gradtrace.commands.probe.session import run_probe
from gradtrace.commands.verify.page import better_score
from gradtrace.commands.verify.session import STORED, Settings, VerifyResult, of_trace, run_verify
from gradtrace.config.loader import load_config, to_yaml
from gradtrace.errors import GradtraceError
from gradtrace.instruments.verify.measure import Size, spearman
from gradtrace.instruments.verify.trial import BASELINE
from gradtrace.instruments.verify.verification import OWN, silent, usual_scores
from gradtrace.policy.optimizer import Optimizer
from gradtrace.trace.run_files import RunFiles
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
    *("trainer.influence_trace.enable=true", "trainer.influence_trace.projection_dim_factor=0"),
    *("trainer.influence_trace.loss_term_prompts=0", "task.arithmetic.layers=2"),
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


def test_it_reproduces_the_figures_of_the_benchmark(made: tuple[Path, Path], tmp_path: Path) -> None:
    run, kept = made
    found = verify(run / "checkpoints" / "step_000001", output=tmp_path / "v").verification
    chosen = {name: Score(config, coming=True) for name, config in usual_scores().items()}
    benchmark = judge(kept, chosen, SMALL, seed=0)["agreement"]
    for name in (*chosen, BASELINE):
        for kind, values in benchmark[name].items():
            assert found.agreement[name][kind] == pytest.approx(values, abs=1e-9), (name, kind)
    # What training stored is what is computed now, but for the gradient of the groups that are left out here.
    stored, now = (torch.cat([found.predictions[n][r] for r in found.predictions[OWN]]) for n in (STORED, OWN))
    assert spearman(stored, now) > 0.98


def test_the_function_has_the_results_of_the_command(made: tuple[Path, Path], tmp_path: Path) -> None:
    """`gradtrace.verify` with the model and the optimizer of a loop of one's own, on the same groups."""
    checkpoint = made[0] / "checkpoints" / "step_000001"
    expected = verify(checkpoint, output=tmp_path / "v").verification
    config = load_config([f"resume={made[0]}", trusted(made[0])])
    model = AutoModelForCausalLM.from_pretrained(checkpoint / "policy")
    own = Optimizer(dict(model.named_parameters()), config.actor.optim, config.trainer.total_steps)
    own.load_state_tensors(load_file(checkpoint / "optimizer.safetensors"))
    own.begin_step(2)
    step = open_run(made[0]).step("influence_trace", 2)
    material = of_trace(step, SMALL.groups)
    ids = [s.tolist() for s in material.sequences]
    lengths = [len(s) - p for s, p in zip(ids, material.prompt_lengths, strict=True)]
    found = gradtrace.verify(
        model,
        own.adamw,
        prompt_ids=[s[:p] for s, p in zip(ids, material.prompt_lengths, strict=True)],
        response_ids=[s[p:] for s, p in zip(ids, material.prompt_lengths, strict=True)],
        rewards=material.accepted.double().tolist(),
        advantages=material.advantages.tolist(),
        scores=[material.given[STORED][r] for r in range(len(ids))],
        grad_clip=config.actor.optim.grad_clip,
        batch_tokens=round(16 * sum(lengths) / len(lengths)),
        groups=SMALL.groups,
        tokens=SMALL.tokens,
        halves=SMALL.halves,
    )
    names = {"given scores": STORED, "optimizer, loss term": "optimizer, loss term", BASELINE: BASELINE}
    for ours, theirs in names.items():
        for kind, values in expected.agreement[theirs].items():
            assert found.agreement[ours][kind] == pytest.approx(values, abs=1e-9), (ours, kind)


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
    from gradtrace import open_run
    from gradtrace.trace.writer import TraceWriter

    step = open_run(run_dir).step("influence_trace", 2)
    columns = {name: np.array(step[name]) for name in step.columns}
    columns["influence_loss_term"] *= -1
    with TraceWriter(run_dir, "influence_trace") as writer:
        writer.truncate_after(1)
        writer.write(2, columns, step.meta)
    assert verify(run_dir).verification.is_trustworthy is False


def test_where_another_score_is_clearly_better_the_command_says_how_to_have_it() -> None:
    table = {"stored scores": 0.6, "optimizer, loss term": 0.93, "identity, position": 0.3, BASELINE: 0.2}
    record = {"judged": STORED, "table": {name: {"single_token": [v, v, v, 8]} for name, v in table.items()}}
    said = better_score(record)
    assert said.startswith(
        "A better score here is 'optimizer, loss term' (.93): trainer.influence_trace.hessian_mode=optimizer"
    )
    load_config(said.split(": ")[1].split())  # the words are settings
    record["judged"] = "optimizer, loss term"
    assert better_score(record) == ""


def test_fresh_scores_at_the_latest_checkpoint_and_at_a_plain_model(run_dir: Path, tmp_path: Path) -> None:
    fresh = verify(run_dir, fresh=True)
    assert fresh.folder == run_dir / "verify" / "step_000002" and fresh.facts["scores"] == "fresh"
    assert fresh.verification.judged == OWN
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
    grid = parse_grid([*small.overrides(tmp_path, *KNOBS), "sweep.influence.projection_dim_factor=0,4"])
    for number, path in enumerate((ours, theirs)):
        ablate(grid, tmp_path / f"ablation_{number}", path, repeat=1)
    cells = [sorted((tmp_path / f"ablation_{number}" / "cells").iterdir()) for number in (0, 1)]
    assert [cell.name for cell in cells[0]] == [cell.name for cell in cells[1]] and len(cells[0]) == 2
    for one, other in zip(*cells, strict=True):
        with np.load(one) as first, np.load(other) as second:
            assert np.array_equal(first["influence_tail"], second["influence_tail"])


def test_a_checkpoint_of_verl_is_that_of_the_embedded_loop(run_dir: Path, tmp_path: Path) -> None:
    expected, other = verify(run_dir), tmp_path / "verl"
    actor, state = as_of_verl(run_dir, other)
    for path in (other, other / "checkpoints" / "global_step_1"):
        found = verify(path, trusted(run_dir))
        assert found.facts["scores"] == "stored by training step 2"
        assert found.record()["table"] == expected.record()["table"]
    with pytest.raises(GradtraceError, match=r"no complete checkpoint of step 7; it has \[1\]"):
        verify(other / "checkpoints" / "global_step_7")
    del state[0]
    shutil.rmtree(other / "checkpoints" / "step_000001")
    torch.save({"state": state, "param_groups": []}, actor / "optim_world_size_1_rank_0.pt")
    with pytest.raises(GradtraceError, match="LoRA adapters are merged into it"):
        verify(other)


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
        (["trainer.influence_trace.credits=tail"], "trainer.influence_trace.credit"),
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
    with pytest.raises(GradtraceError, match="no group has both accepted and rejected"):
        verify(run_dir, "trainer.influence_trace.accepted_threshold=-1", fresh=True)
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
    assert next(found.verification.predictions[OWN].values().__iter__()).dtype == torch.float64
    assert all(any(value != 0 for value in e.measured) for e in found.verification.effects)
