"""A run, a checkpoint or a model that came from somebody else executes nothing, and says what it would have."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from gradtrace.cli import main
from gradtrace.config.loader import load_config
from gradtrace.errors import GradtraceError
from gradtrace.policy.load import load_model, load_tokenizer
from gradtrace.policy.settings import ModelConfig
from gradtrace.training.run import train
from tests.training import small

MALICIOUS = "open({file!r}, 'w').write('executed')\ndef count_ones(response, item): return 1.0\n"


def test_reward_of_a_received_run_is_not_executed_unless_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = train(small.config(tmp_path, "trainer.total_steps=1", "trainer.checkpoint.every=1")).run_dir
    executed = tmp_path / "executed"
    (tmp_path / "reward.py").write_text(MALICIOUS.format(file=str(executed)))
    checkpoint = run_dir / "checkpoints" / "step_000001"
    for command in (
        ["train", f"resume={run_dir}", "trainer.total_steps=2"],
        ["train", f"resume={checkpoint}", "trainer.total_steps=2"],
        ["probe", str(checkpoint)],
        ["probe", str(run_dir)],
        ["ablate", f"resume={run_dir}", "sweep.influence.hessian_mode=inverse,identity"],
    ):
        assert main(command) == 2
        assert "names Python code to execute, reward.path=" in capsys.readouterr().err, command
        assert not executed.exists()
    asked = small.resume(run_dir, "trainer.total_steps=2")
    assert train(asked).finished and executed.exists()


class Payload:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (Path.touch, (self.file,))


def test_pickles_in_a_verl_checkpoint_are_not_executed(tmp_path: Path) -> None:
    from gradtrace.integrations.verl.launch.checkpoints import full_model, full_states

    executed = tmp_path / "executed"
    torch.save({"w": Payload(executed)}, tmp_path / "model_world_size_1_rank_0.pt")
    with pytest.raises(GradtraceError, match=r"model_world_size_1_rank_0\.pt cannot be read as plain tensors"):
        full_model(tmp_path)
    assert not executed.exists()
    (tmp_path / "model_world_size_1_rank_0.pt").write_bytes(pickle.dumps(Payload(executed)))
    with pytest.raises(GradtraceError):
        full_model(tmp_path)
    assert not executed.exists()
    import random

    import numpy

    state = {
        "lr_scheduler": {"last_epoch": 3},
        "rng": {"cpu": torch.get_rng_state(), "numpy": numpy.random.get_state(), "random": random.getstate()},
    }
    torch.save(state, tmp_path / "extra_state_world_size_1_rank_0.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "model_world_size_1_rank_0.pt")
    assert full_states(tmp_path, "extra_state")[0]["lr_scheduler"] == {"last_epoch": 3}


def test_verls_own_loading_is_held_to_plain_tensors(tmp_path: Path) -> None:
    """verl says weights_only=False, in its engine and for its data loader."""
    from gradtrace.integrations.verl.launch.checkpoints import PLAIN, plain_tensors_only

    executed = tmp_path / "executed"
    torch.save({"w": Payload(executed)}, tmp_path / "data.pt")
    with plain_tensors_only(), pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "data.pt", weights_only=False)
    assert not executed.exists() and PLAIN not in os.environ
    torch.load(tmp_path / "data.pt", weights_only=False)
    assert executed.exists()  # the payload would have worked


@pytest.mark.parametrize("file", ["rank/engine.py", "driver/trainer.py"])
def test_both_places_where_verl_loads_are_held(file: str) -> None:
    import gradtrace

    source = (Path(gradtrace.__file__).parent / "integrations" / "verl" / file).read_text()
    assert "with plain_tensors_only():" in source and "load_checkpoint(" in source


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return train(small.config(folder, "trainer.total_steps=1")).run_dir / "policy"


def copied(model: Path, target: Path) -> Path:
    target.mkdir()
    for path in model.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.mark.parametrize("kind", ["config.json", "tokenizer_config.json"])
def test_code_in_a_model_folder_is_refused_without_a_question(model: Path, tmp_path: Path, kind: str) -> None:
    folder = copied(model, tmp_path / "model")
    executed = tmp_path / "executed"
    (folder / "evil.py").write_text(f"open({str(executed)!r}, 'w')\nclass Evil: pass\n")
    content = json.loads((folder / kind).read_text())
    content |= {"model_type": "evil"} if kind == "config.json" else {"tokenizer_class": "Evil"}
    names = ("AutoConfig", "AutoModelForCausalLM", "AutoModel")
    content["auto_map"] = dict.fromkeys(names, "evil.Evil") | {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    (folder / kind).write_text(json.dumps(content))
    try:
        load_tokenizer(folder)
        load_model(folder, ModelConfig(device="cpu"))
    except GradtraceError:
        pass
    assert not executed.exists()


def test_model_without_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    folder = copied(model, tmp_path / "model")
    for path in folder.glob("*token*"):
        path.unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(GradtraceError, match=r"model\.path=.*tokenizer"):
        load_tokenizer(folder)


def test_model_with_missing_weights_is_refused(model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = copied(model, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights[next(name for name in weights if "mlp" in name)]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(GradtraceError, match=r"1 weights are not in its files.*mlp"):
        load_model(folder, ModelConfig(device="cpu"))


def test_checkpoint_names_do_not_lead_out_of_the_run(model: Path) -> None:
    run_dir = model.parent
    latest = run_dir / "checkpoints" / "latest"
    before = latest.read_text()
    latest.write_text("../../../../etc\n")
    with pytest.raises(GradtraceError, match="not a complete checkpoint"):
        train(small.resume(run_dir))
    latest.write_text(before)
    assert load_config(["recipe=demo"]).resume == ""
