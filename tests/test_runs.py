"""`open_run` opens every kind of run and model, and names what a run does not hold."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gradtrace
from gradtrace.errors import GradtraceError
from gradtrace.integrations.trl.settings import TraceSettings, run_config
from gradtrace.policy.optimizer import learning_rate
from gradtrace.rollout import SamplingParams
from gradtrace.runs import NotStoredError, Run, open_run
from gradtrace.training.run import train
from tests.commands.test_import import imported, plain_rows, write
from tests.instruments.test_record import close, step
from tests.instruments.test_verify_command import as_of_verl
from tests.integrations.trl_runs import grpo_trainer
from tests.tasks.byte_model import save_byte_model
from tests.training import small

KNOBS = ("trainer.total_steps=2", "trainer.checkpoint.every=1", "trainer.influence_trace.enable=true")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(small.config(tmp_path_factory.mktemp("trained"), *KNOBS)).run_dir


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("model"))


def trusted(run_dir: Path) -> str:
    return f"reward.path={run_dir.parents[1] / 'reward.py'}:count_ones"


def weights(run: Run, step: int | None = None) -> torch.Tensor:
    return next(run.policy(step, precision="float32").model.parameters()).detach()


def test_reading_a_run_does_not_import_torch(trained: Path) -> None:
    program = (
        "import sys, gradtrace\n"
        f"run = gradtrace.open_run({str(trained)!r})\n"
        "assert run.step('influence_trace', 2).n_responses and len(run.checkpoints) == 3 and run.metrics()[0]\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_run_has_its_checkpoints_and_gives_the_newest_weights_unless_told(trained: Path) -> None:
    run = open_run(trained)
    assert [(each.name, each.step, each.made_by) for each in run.checkpoints] == [
        ("step_000001", 1, "embedded"),
        ("step_000002", 2, "embedded"),
        ("policy", 2, "final"),
    ]
    assert run.checkpoint().folder == trained / "policy"
    assert run.checkpoint(resumable=True).folder == trained / "checkpoints" / "step_000002"
    assert torch.equal(weights(run), weights(run, 2)) and not torch.equal(weights(run), weights(run, 1))
    assert torch.equal(weights(run, 1), weights(open_run(trained / "checkpoints" / "step_000001")))
    assert run.policy(1).model.dtype == torch.float64, "auto, for a small model"


def test_a_run_gives_what_training_goes_on_with(trained: Path) -> None:
    run = open_run(trained / "checkpoints" / "step_000001", [trusted(trained), "actor.optim.lr=0.5"])
    assert run.settings.actor.optim.lr == 0.5 and run.task.name == "arithmetic"
    assert run.reward(["11"], [{}]) == pytest.approx([2.2])
    policy = run.policy(trainable=True)
    optimizer = run.optimizer(policy)
    assert optimizer.param_groups[0]["lr"] == learning_rate(run.settings.actor.optim, 2, 2) and len(
        optimizer.state
    ) == len(policy.trainable())
    assert not run.optimizer(policy, kind="sgd", lr=0.1).state
    params = SamplingParams.of(run.settings.rollout, run.task.stop_token_ids)
    generator = torch.Generator().manual_seed(0)
    prompts = [run.task.next_prompts(1)[0].ids]
    sampled = run.sampler(run.policy(precision="float32")).generate(prompts, params, generator=generator)
    assert len(sampled) == 3


def test_what_the_run_names_as_code_is_not_executed_for_its_weights(trained: Path) -> None:
    run = open_run(trained)
    assert weights(run).numel() and run.settings.reward.path
    with pytest.raises(GradtraceError, match=r"names Python code to execute, reward\.path="):
        _ = run.reward


def test_a_checkpoint_of_verl_is_converted(trained: Path, tmp_path: Path) -> None:
    as_of_verl(trained, tmp_path / "verl")
    run = open_run(tmp_path / "verl")
    assert [(each.name, each.made_by) for each in run.checkpoints] == [("step_000001", "verl")]
    assert torch.equal(weights(run), weights(open_run(trained), 1))
    assert [(each.name, each.made_by) for each in run.checkpoints] == [("step_000001", "embedded")]
    named = open_run(tmp_path / "verl" / "checkpoints" / "global_step_1")
    assert named.checkpoint().folder == tmp_path / "verl" / "checkpoints" / "step_000001"
    with pytest.raises(NotStoredError, match=r"no complete checkpoint of step 7; it has \[1\]"):
        open_run(tmp_path / "verl" / "checkpoints" / "global_step_7").checkpoint()


def test_models_and_names_of_the_hub_are_runs_without_records(model: Path) -> None:
    plain = open_run(model, ["rollout.temperature=0.5"])
    assert plain.policy().temperature == 0.5 and plain.tokenizer("1")["input_ids"] and plain.kinds() == []
    assert [each.made_by for each in plain.checkpoints] == ["plain"] and "a model" in repr(plain)
    hub = open_run("owner/model")
    assert str(hub.checkpoint().weights) == "owner/model" and "a model" in repr(hub)
    for read in (lambda: hub.steps("influence_trace"), hub.metrics, lambda: hub.config):
        with pytest.raises(NotStoredError, match="names a model on the hub, which has no traces"):
            read()
    with pytest.raises(GradtraceError, match="runs/no-such-run: there is no such folder"):
        open_run("runs/no-such-run")


def test_a_run_of_trl_names_the_model_that_it_started_from(model: Path, tmp_path: Path) -> None:
    trainer = grpo_trainer(tmp_path)
    trainer.model.config._name_or_path, trainer.state.max_steps = str(model), 4
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(run_config(trainer, TraceSettings(run_dir=folder)))
    (folder / "entropy_trace").mkdir()
    (folder / "entropy_trace" / "manifest.jsonl").touch()
    run = open_run(folder)
    assert run.settings.rollout.n == trainer.num_generations and run.settings.engine == "embedded"
    assert torch.equal(weights(run, 0), weights(open_run(model))) and run.tokenizer("1")["input_ids"]
    with pytest.raises(NotStoredError, match=r"has no weights: it was recorded or imported.* with --model"):
        run.policy()
    with pytest.raises(NotStoredError, match=r"neither the prompts nor the reward functions: say which, with"):
        _ = run.reward


def test_a_recorded_run_needs_a_model(model: Path, tmp_path: Path) -> None:
    gradtrace.record(tmp_path / "run", 1, **step())
    close(tmp_path / "run")
    run = open_run(tmp_path / "run", ["rollout.n=3"])
    assert run.settings.rollout.n == 3 and run.steps("entropy_trace") == [1]
    for wanted in (lambda: run.policy(), lambda: run.optimizer(None), lambda: run.tokenizer):  # type: ignore[arg-type]
        with pytest.raises(NotStoredError, match=r"has no checkpoints/ and no policy/.* with --model"):
            wanted()
    with pytest.raises(NotStoredError, match=r"it has no config\.yaml"):
        _ = run.task
    assert torch.equal(weights(run.with_model(model)), weights(open_run(model)))


def test_an_imported_run_has_a_tokenizer_and_prompts_and_needs_a_model(model: Path, tmp_path: Path) -> None:
    path = imported(write(tmp_path / "rows.jsonl", plain_rows()), model).path
    moved = Path(shutil.move(path, tmp_path / "moved"))
    run = open_run(moved)
    assert run.tokenizer("1")["input_ids"] and run.task.find(run.step("entropy_trace", 3).group(0).prompt_ids.tolist())
    with pytest.raises(NotStoredError, match="with --model"):
        run.policy()
    with pytest.raises(NotStoredError, match="no weights of step 0"):
        run.policy(0)
    assert torch.equal(weights(run.with_model(model)), weights(open_run(model)))


def test_what_a_run_does_not_hold_is_named(trained: Path, model: Path, tmp_path: Path) -> None:
    with pytest.raises(NotStoredError, match=r"no weights of step 9: .*checkpoints has step_000001, step_000002"):
        open_run(trained).policy(9)
    with pytest.raises(NotStoredError, match=r"is no model: it has no config\.json, and no policy/ or checkpoints/"):
        open_run(tmp_path).policy()
    with pytest.raises(NotStoredError, match="is no checkpoint and no run with one"):
        open_run(tmp_path).checkpoint(resumable=True)
    with pytest.raises(NotStoredError, match=r"is a model without optimizer state: .* optimizer=adamw"):
        open_run(model).check_optimizer("checkpoint", "probe")
    copy = shutil.copytree(trained, tmp_path / "copy")
    (copy / "checkpoints" / "step_000001" / "policy" / "model.safetensors").write_bytes(b"")
    with pytest.raises(GradtraceError, match=r"is damaged: policy/model\.safetensors"):
        open_run(copy).policy(1)
