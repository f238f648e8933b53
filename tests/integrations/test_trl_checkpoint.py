"""A checkpoint of TRL is one to score with: its optimizer.pt goes to the parameters that it belongs to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import gradtrace
from gradtrace.cli import main
from gradtrace.errors import GradtraceError
from gradtrace.policy.load import load_with_adapters
from gradtrace.policy.optimizer import Optimizer
from gradtrace.policy.settings import ModelConfig, OptimConfig
from gradtrace.training.state import load_foreign_state
from tests.integrations.trl_runs import grpo_trainer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, torch.Tensor]]]:
    """What TRL saved after two steps, and the state that its optimizer had then, by parameter."""
    trainer = grpo_trainer(tmp_path_factory.mktemp("saved"), save_strategy="steps", save_steps=2, adam_beta2=0.95)
    trainer.train()
    held = {name: dict(trainer.optimizer.state[p]) for name, p in trainer.model.named_parameters()}
    return Path(trainer.args.output_dir) / "checkpoint-2", held


def test_every_moment_goes_to_its_own_parameter(checkpoint: tuple[Path, dict]) -> None:
    folder, held = checkpoint
    model = load_with_adapters(folder, ModelConfig(device="cpu"), trainable=True)
    optimizer = Optimizer(dict(model.named_parameters()), OptimConfig(), 1)
    load_foreign_state(optimizer, model, folder / "optimizer.pt")
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(optimizer.adamw.state[parameter][key], held[name][key], msg=name)
    assert optimizer.adamw.param_groups[0]["betas"][1] == 0.95


def test_attribute_and_verify_use_it_and_say_so(
    checkpoint: tuple[Path, dict], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = checkpoint
    rows = [
        {"prompt": prompt, "response": answer, "reward": float(answer == "3")}
        for prompt in ("1+2=", "6+6=")
        for answer in ("3", "12", "4*4")
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = tmp_path / "run"
    assert main(["trace", "import", str(tmp_path / "rows.jsonl"), str(run), "--tokenizer", str(folder)]) == 0
    assert main(["attribute", str(run), "--model", str(folder)]) == 0
    assert "the optimizer's state in" in capsys.readouterr().out
    meta = gradtrace.open_run(run).step("influence_trace", 1).meta
    assert meta["optimizer_state"].endswith(str(folder))
    (update,) = meta["updates"]
    assert update["second_moment"] == "state_with_batch" and update["learning_rate"] == 1e-2, "the Trainer's, not ours"
    words = ["--budget", "20s", "--groups", "2", "--tokens", "2", "--halves", "0", "lr=1e-4"]
    assert main(["verify", str(run), "--model", str(folder), *words]) in (0, 1, 3)


def test_a_state_of_another_model_is_refused(checkpoint: tuple[Path, dict], tmp_path: Path) -> None:
    folder, _ = checkpoint
    model = load_with_adapters(folder, ModelConfig(device="cpu"), trainable=True)
    model.lm_head.requires_grad_(False)
    optimizer = Optimizer({n: p for n, p in model.named_parameters() if p.requires_grad}, OptimConfig(), 1)
    with pytest.raises(GradtraceError, match="trainable ones"):
        load_foreign_state(optimizer, model, folder / "optimizer.pt")
    (tmp_path / "optimizer.pt").write_bytes(b"nothing")
    with pytest.raises(GradtraceError, match="no state of Adam"):
        load_foreign_state(optimizer, model, tmp_path / "optimizer.pt")
