"""`gradtrace probe` on the checkpoints of a real run: results, resuming, and one clear sentence for every bad input."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from gradtrace import open_run
from gradtrace.cli import main
from gradtrace.commands.probe import session
from gradtrace.commands.probe.config import ProbeConfig, load_probe_config
from gradtrace.commands.probe.session import Probe
from gradtrace.errors import GradtraceError
from gradtrace.instruments.entropy_probe import ProbeBatch
from gradtrace.instruments.entropy_probe.probe import EntropyProbe
from gradtrace.rollout import Sampler
from gradtrace.trace.results import load_batch, save_batch
from gradtrace.training.checkpoint import write_marker
from gradtrace.training.run import train
from tests.training import small

SIZES: dict[str, Any] = {"evaluation_prompts": 12, "update_prompts": 3, "update_n": 3}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps, a checkpoint after each."""
    folder = tmp_path_factory.mktemp("probed")
    more = ("trainer.total_steps=3", "trainer.checkpoint.every=1", "trainer.checkpoint.keep_last=0")
    return train(small.config(folder, *more, "actor.optim.lr=1e-3", "actor.optim.weight_decay=0.1")).run_dir


@pytest.fixture(scope="module")
def finished(run_dir: Path) -> Probe:
    return run_probe(run_dir / "checkpoints" / "step_000002", config(fresh=False), output=run_dir / "finished")


@pytest.fixture
def checkpoint(run_dir: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    shutil.copytree(run_dir, tmp_path / "run")
    return tmp_path / "run" / "checkpoints" / "step_000002"


def trusted(checkpoint: Path) -> list[str]:
    """The run's own reward file, asked for by name: a run that one was given could name any code."""
    saved = checkpoint.parent.parent / "config.yaml"
    return [f"reward.path={yaml.safe_load(saved.read_text())['reward']['path']}"] if saved.is_file() else []


def run_probe(
    checkpoint: Path, config: ProbeConfig, overrides: list[str] | None = None, output: Path | None = None
) -> Probe:
    return session.run_probe(checkpoint, config, [*trusted(checkpoint), *(overrides or [])], output)


def config(**settings: Any) -> ProbeConfig:
    words = [f"{key}={json.dumps(value)}" for key, value in (SIZES | {"eta": [0.01, 0.1]} | settings).items()]
    return load_probe_config(None, words)[0]


def refusal(checkpoint: Path, *run_overrides: str, **settings: Any) -> str:
    with pytest.raises(GradtraceError) as caught:
        run_probe(checkpoint, config(**settings), list(run_overrides))
    return str(caught.value)


def test_command_writes_a_report_that_holds_and_a_trace_that_reads(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "probe.yaml").write_text("eta: [0.01, 0.03, 0.1]\nrun: [rollout.max_new_tokens=6]\n")
    words = [*trusted(checkpoint), *(f"{key}={value}" for key, value in SIZES.items())]
    assert main(["probe", str(checkpoint), *words, "--config", str(tmp_path / "probe.yaml")]) == 0
    printed = capsys.readouterr().out
    assert "sampling E" in printed and "predicted (forward mode)" in printed

    folder = tmp_path / "run" / "probes" / "step_000002"
    record = json.loads((folder / "report.json").read_text())
    assert record["step"] == 2 and record["evaluation"]["sequences"] == 12
    assert [row["eta"] for row in record["sweep"]] == [0.01, 0.03, 0.1, 1]
    first = record["sweep"][0]
    assert first["measured"] == pytest.approx(first["predicted"], rel=0.02)
    assert 0.95 < record["log_log_slope"] < 1.05
    whole = record["predicted"]["value"]
    assert record["predicted_legacy"] == pytest.approx(whole, rel=1e-6)
    assert record["shares"]["sum"] == pytest.approx(whole, rel=1e-6)
    assert record["shares"]["momentum"] != 0 and record["shares"]["decay"] != 0
    assert "<svg" in (folder / "report.html").read_text() and (folder / "predicted_vs_measured.svg").exists()
    assert not (folder / "gradient.safetensors").exists()

    step = open_run(folder).step("entropy_probe", 3)
    of_u = step["batch"] == int(ProbeBatch.UPDATE)
    assert of_u.sum() == 9 and step["length"].max() <= 6
    parts = step["share"].sum() + step.meta["momentum_share"] + step.meta["decay_share"]
    assert parts == pytest.approx(whole, rel=1e-4)
    assert open_run(folder).verify() == []


def test_interrupted_probe_goes_on_where_it_was(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = run_probe(checkpoint, config(), output=tmp_path / "straight").record()

    with monkeypatch.context() as patch:

        def interrupted(*args: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(EntropyProbe, "shares", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_probe(checkpoint, config(), output=tmp_path / "resumed")
    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "resumed").glob("*.safetensors")}
    assert {"evaluation.safetensors", "gradient.safetensors", "prediction.safetensors"} < {p.name for p in done}

    with monkeypatch.context() as patch:
        prompts = []
        generate = Sampler.generate

        def counted(self: Sampler, ids: Any, *args: Any, **kwargs: Any) -> Any:
            prompts.append(len(ids))
            return generate(self, ids, *args, **kwargs)

        patch.setattr(Sampler, "generate", counted)
        resumed = run_probe(checkpoint, config(), output=tmp_path / "resumed").record()
    assert prompts == [12, 12, 12]  # fresh samples at three step sizes; neither E nor U again
    assert resumed == straight
    assert all(path.stat().st_mtime_ns == time for path, time in done.items() if path.exists())


def test_other_settings_do_not_touch_the_results_of_an_earlier_probe(checkpoint: Path) -> None:
    first = run_probe(checkpoint, config(fresh=False)).folder
    assert run_probe(checkpoint, config(fresh=False)).folder == first
    second = run_probe(checkpoint, config(fresh=False, seed=1)).folder
    assert (first.name, second.name) == ("step_000002", "step_000002_2")
    with pytest.raises(GradtraceError, match="holds a probe with other settings"):
        run_probe(checkpoint, config(fresh=False, seed=2), output=first)


def test_plain_folder_needs_an_optimizer_by_name_and_then_works(run_dir: Path, tmp_path: Path) -> None:
    run = [word for word in small.overrides(tmp_path) if not word.startswith("trainer.runs_dir")]
    policy = run_dir / "policy"
    assert "say whose update to probe" in refusal(policy, *run)
    for optimizer, precision in (("sgd", "float64"), ("adamw", "float32")):
        settings = config(optimizer=optimizer, precision=precision, lr=0.01, eta=[0.001], fresh=False)
        found = run_probe(policy, settings, run, tmp_path / optimizer).record()
        assert found["shares"]["momentum"] == 0 and found["learning_rate"] == 0.01
        assert found["predicted_legacy"] == pytest.approx(found["predicted"]["value"], rel=1e-3)
        first = found["sweep"][0]
        if precision == "float64":
            assert first["measured"] == pytest.approx(first["predicted"], rel=0.05)


def test_batches_of_one_probe_can_be_given_to_another(finished: Probe, checkpoint: Path, tmp_path: Path) -> None:
    first = finished
    given = config(
        fresh=False,
        evaluation_batch=str(first.folder / "evaluation.safetensors"),
        update_batch=str(first.folder / "update.safetensors"),
    )
    second = run_probe(checkpoint, given, output=tmp_path / "given")
    assert second.prediction.change == first.prediction.change
    assert torch.equal(second.shares.tokens, first.shares.tokens)


@pytest.mark.parametrize(
    "more",
    [
        ("algorithm.kl_coef=0.1", "algorithm.entropy_coef=0.01"),
        ("algorithm.advantage=gae",),
        ("model.lora.rank=2", "algorithm.kl_coef=0.1"),
    ],
)
def test_checkpoints_with_a_reference_a_critic_or_adapters_are_probed(tmp_path: Path, more: tuple[str, ...]) -> None:
    short = ("trainer.total_steps=1", "trainer.validation.every=0", "actor.optim.lr=1e-3")
    run = train(small.config(tmp_path, *short, *more)).run_dir
    found = run_probe(run / "checkpoints" / "step_000001", config(fresh=False)).record()
    assert found["shares"]["momentum"] != 0
    assert found["shares"]["sum"] == pytest.approx(found["predicted"]["value"], rel=1e-6)


# ---------------------------------------------------------------- bad input, before anything is sampled


@pytest.fixture(autouse=True)
def nothing_is_sampled_after_a_refusal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "refused" in request.node.name:
        monkeypatch.setattr(Sampler, "generate", lambda *args, **kwargs: pytest.fail("sampled"))


def test_checkpoint_without_optimizer_state_is_refused(checkpoint: Path) -> None:
    (checkpoint / "optimizer.safetensors").unlink()
    write_marker_again(checkpoint)
    assert "has no optimizer state" in refusal(checkpoint)


def test_optimizer_state_of_another_model_is_refused_by_name(checkpoint: Path) -> None:
    path = checkpoint / "optimizer.safetensors"
    state = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({key: value for key, value in state.items() if key != f"exp_avg/{name}"}, path)
    write_marker_again(checkpoint)
    assert f"has no exp_avg of parameter {name}" in refusal(checkpoint)
    state[f"exp_avg/{name}"] = torch.zeros(2, 3)
    save_file(state, path)
    write_marker_again(checkpoint)
    assert f"'{name}' (2, 3), which the model has not" in refusal(checkpoint)


def write_marker_again(checkpoint: Path) -> None:
    (checkpoint / "complete.json").unlink()
    write_marker(checkpoint)


def test_damaged_checkpoint_is_refused(checkpoint: Path) -> None:
    (checkpoint / "optimizer.safetensors").write_bytes(b"")
    assert "is damaged: optimizer.safetensors" in refusal(checkpoint)
    assert "there is no such folder" in refusal(checkpoint / "nowhere")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("rollout.top_p=0.9", "top_p=0.9, top_k=0: tokens that cannot be drawn have no importance weight"),
        ("rollout.top_k=5", "top_k=5"),
        ("actor.optim.lr=0", "the learning rate of step 3 is 0"),
    ],
)
def test_run_settings_that_spoil_a_probe_are_refused(checkpoint: Path, override: str, sentence: str) -> None:
    assert sentence in refusal(checkpoint, override)


def test_entropy_is_that_of_the_temperature_the_run_trains_at(finished: Probe, checkpoint: Path) -> None:
    """Sampled, weighed and differentiated at 0.7: a small step measures what was predicted."""
    results = run_probe(checkpoint, config(fresh=False), ["rollout.temperature=0.7"])
    small_step = results.sweep()[0]
    assert small_step["measured"] == pytest.approx(small_step["predicted"], rel=0.05)
    missing = [math.log(18) - one.prediction.base.mean_entropy for one in (results, finished)]
    assert missing[0] > 1.5 * missing[1] > 0  # next to uniform over 18 tokens, what is missing goes with 1/T²
    log_probs = results.prediction.base.log_probs.float()
    assert torch.allclose(log_probs, results.evaluation.sampler_log_probs[results.evaluation.response_mask], atol=1e-4)


def test_overlapping_or_empty_or_foreign_batches_are_refused(finished: Probe, checkpoint: Path, tmp_path: Path) -> None:
    E, U = finished.evaluation, finished.update
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    path = tmp_path / "batch.safetensors"

    save_batch(U, sampling, path)
    overlapping = refusal(checkpoint, evaluation_batch=str(path), update_batch=str(path))
    assert "E and U overlap: 3 of 3 prompts" in overlapping

    empty = E.replace(response_mask=E.response_mask.clone())
    empty.response_mask[4] = False
    save_batch(empty, sampling, path)
    assert "response 4 has no tokens" in refusal(checkpoint, evaluation_batch=str(path))

    save_batch(E, sampling | {"temperature": 0.5}, path)
    sentence = refusal(checkpoint, evaluation_batch=str(path))
    assert "sampled at temperature=0.5, and the run trains at rollout.temperature=1" in sentence

    save_batch(E, sampling | {"top_p": 0.5}, path)
    assert "top_p=0.5" in refusal(checkpoint, evaluation_batch=str(path))

    save_batch(E, sampling, path)
    assert "have no rewards" in refusal(checkpoint, update_batch=str(path))
    assert load_batch(path)[0].prompts == E.prompts
    path.write_bytes(b"not a batch")
    assert "cannot be read" in refusal(checkpoint, evaluation_batch=str(path))


def test_evaluation_batch_of_another_policy_is_found_out(finished: Probe, checkpoint: Path, tmp_path: Path) -> None:
    E = finished.evaluation
    other = E.replace(sampler_log_probs=E.sampler_log_probs - 0.1)
    save_batch(other, {"temperature": 1.0, "top_p": 1.0, "top_k": 0}, tmp_path / "other.safetensors")
    sentence = refusal(checkpoint, evaluation_batch=str(tmp_path / "other.safetensors"))
    assert "was not sampled from this policy: its log-probs differ by 0.1" in sentence


def test_misspelt_settings_name_the_nearest_key(tmp_path: Path) -> None:
    with pytest.raises(GradtraceError, match="evaluation_prompts"):
        load_probe_config(None, ["evaluation_prompt=3"])
    (tmp_path / "probe.yaml").write_text("updat_n: 3\n")
    with pytest.raises(GradtraceError, match="Did you mean 'update_n'"):
        load_probe_config(tmp_path / "probe.yaml", [])
    with pytest.raises(GradtraceError, match="step sizes are positive"):
        load_probe_config(None, ["eta=[0,1]"])
    settings, run = load_probe_config(None, ["eta=[2]", "rollout.max_new_tokens=4", "recipe=demo"])
    assert settings.eta == [1.0, 2.0] and run == ["rollout.max_new_tokens=4", "recipe=demo"]


def test_phases_and_their_seconds_are_in_the_log_and_in_the_report(finished: Probe) -> None:
    folder = finished.write()
    seconds = json.loads((folder / "report.json").read_text())["phase_seconds"]
    log = (folder / "run.log").read_text()
    assert {"loading the model", "sampling E", "gradient of U", "E before the update"} <= seconds.keys()
    assert all(f"{name}: " in log for name in seconds)


def test_probe_that_is_refused_leaves_no_folder(checkpoint: Path) -> None:
    refusal(checkpoint, "trainer.seed=${nothing}")
    assert not (checkpoint.parent.parent / "probes").exists()


def test_run_stands_for_its_latest_checkpoint(run_dir: Path) -> None:
    assert open_run(run_dir).checkpoint(resumable=True).folder == run_dir / "checkpoints" / "step_000003"
