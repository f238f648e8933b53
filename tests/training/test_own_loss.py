"""`algorithm.path`: policy losses and advantages in a file of the user's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gradtrace.algorithms.registry import advantages, policy_losses
from gradtrace.cli import main
from gradtrace.config.loader import load_config
from gradtrace.errors import GradtraceError
from gradtrace.runs import open_run
from gradtrace.training.run import train
from tests.training import small

OWN = """
from pathlib import Path
from gradtrace.algorithms import AdvantageOutputs, LossOutputs, register_advantage, register_policy_loss

Path({executed!r}).touch()

@register_policy_loss("own_reinforce", plain_at_ratio_one=True)
def own_reinforce(inputs, *, scale=1.0):
    loss = -scale * inputs.advantages * inputs.log_probs
    return LossOutputs(loss, {{"actor/own": inputs.mask.float()}})

@register_advantage("own_mean")
def own_mean(inputs):
    return AdvantageOutputs((inputs.rewards - inputs.rewards.mean())[:, None] * inputs.mask)
"""
ON_POLICY = (
    "trainer.total_steps=1",
    "actor.mini_batch_size=0",
    "actor.optim.grad_clip=0",
    "trainer.validation.every=0",
)


@pytest.fixture(autouse=True)
def forget_own() -> object:
    """What a file registers is forgotten after its test: others list what ships."""
    before = dict(policy_losses.entries()), dict(advantages.entries())
    yield
    policy_losses._entries, advantages._entries = before


def write(folder: Path, name: str = "my_losses.py") -> Path:
    file = folder / name
    file.write_text(OWN.format(executed=str(folder / "executed")))
    return file


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "policy" / "model.safetensors")


def test_a_run_with_the_users_own_loss_takes_the_step_that_it_says(tmp_path: Path) -> None:
    """On policy the gradient of ppo is that of −A log π."""
    file = write(tmp_path)
    own = train(small.config(tmp_path, *ON_POLICY, f"algorithm.path={file}", "algorithm.policy_loss=own_reinforce"))
    ppo = train(small.config(tmp_path, *ON_POLICY))
    metrics = small.metrics(own.run_dir)[-1]
    assert metrics["actor/own"] == pytest.approx(1.0)
    ours, theirs = weights(own.run_dir), weights(ppo.run_dir)
    for name, values in theirs.items():
        torch.testing.assert_close(ours[name], values, rtol=1e-4, atol=1e-5)


def test_a_relative_path_is_found_again_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path)
    monkeypatch.chdir(tmp_path)
    chosen = ("algorithm.path=my_losses.py", "algorithm.advantage=own_mean", "algorithm.policy_loss=own_reinforce")
    run_dir = train(small.config(tmp_path, "trainer.total_steps=1", *chosen)).run_dir
    monkeypatch.chdir("/")
    assert open_run(run_dir).settings.algorithm.path == str(file)
    resumed = small.resume(run_dir, "trainer.total_steps=2", f"algorithm.path={file}")
    assert resumed.algorithm.policy_loss == "own_reinforce" and train(resumed).finished


def test_code_of_a_received_run_is_executed_only_where_the_command_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path)
    chosen = (f"algorithm.path={file}", "algorithm.policy_loss=own_reinforce", "trainer.checkpoint.every=1")
    run_dir = train(small.config(tmp_path, "trainer.total_steps=1", *chosen)).run_dir
    received = write(tmp_path, "received.py")
    saved = run_dir / "config.yaml"
    saved.write_text(saved.read_text().replace(str(file), str(received)))
    (tmp_path / "executed").unlink()
    reward = f"reward.path={tmp_path / 'reward.py'}:count_ones"
    for command in (["train", f"resume={run_dir}", reward], ["probe", str(run_dir), reward]):
        assert main(command) == 2
        assert "names Python code to execute, algorithm.path=" in capsys.readouterr().err, command
    assert open_run(run_dir).settings.algorithm.policy_loss == "own_reinforce"
    assert not (tmp_path / "executed").exists()
    del policy_losses.entries()["own_reinforce"], advantages.entries()["own_mean"]
    load_config([f"resume={run_dir}", reward, f"algorithm.path={received}"])
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no file"),
        ("x = 1", "registers no policy loss and no advantage"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        (OWN.format(executed=""), "did you mean 'own_reinforce'"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(tmp_path: Path, content: str | None, words: str) -> None:
    file = tmp_path / "mistaken.py"
    if content is not None:
        file.write_text(content)
    with pytest.raises(GradtraceError, match=words) as caught:
        load_config([f"algorithm.path={file}", "algorithm.policy_loss=own_reinforc"])
    assert words.startswith("did you") or f"algorithm.path={file}" in str(caught.value)
