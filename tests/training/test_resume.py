"""N steps straight, and k steps, a stop and N − k more, are the same run: weights, random states, metrics."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gradtrace.errors import GradtraceError
from gradtrace.training.run import train
from tests.training import small
from tests.training.small import config, metrics

VARIANTS = {
    "grpo": [],
    "several_epochs_and_cosine": [
        "actor.epochs=2",
        "actor.optim.schedule=cosine",
        "actor.optim.warmup_steps=2",
    ],
    "dapo": ["algorithm.dynamic_sampling.enable=true", "algorithm.entropy_coef=0.01"],
    "kl_reference": ["algorithm.kl_coef=0.1"],
    "ppo_with_critic": ["algorithm.advantage=gae", "critic.optim.lr=1e-3"],
    "lora": ["model.lora.rank=2", "model.lora.dropout=0.5"],
}


def files(run_dir: Path, step: int) -> dict[str, bytes]:
    folder = run_dir / "checkpoints" / f"step_{step:06d}"
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_resumed_run_equals_the_straight_run(tmp_path: Path, variant: str) -> None:
    settings = config(tmp_path, "actor.optim.schedule_steps=5", *VARIANTS[variant])
    settings.trainer.total_steps = 5
    straight = train(settings).run_dir
    # Stopping after step 2: the run's own horizon is shorter, everything else is the same.
    stopped = dataclasses.replace(settings, trainer=dataclasses.replace(settings.trainer, total_steps=2))
    first_part = train(stopped).run_dir
    torch.manual_seed(12345)  # the state of this process must not matter
    resumed = train(small.resume(first_part, "trainer.total_steps=5"))
    assert resumed.finished and resumed.run_dir == first_part
    assert metrics(first_part) == metrics(straight)
    a, b = files(straight, 5), files(first_part, 5)
    assert a.keys() == b.keys()
    different = [name for name in a if a[name] != b[name]]
    assert different == [], f"not bit-identical after resuming: {different}"


def test_same_seed_gives_the_same_run_and_another_seed_does_not(tmp_path: Path) -> None:
    runs = [train(config(tmp_path, f"trainer.seed={seed}")).run_dir for seed in (3, 3, 4)]
    assert metrics(runs[0]) == metrics(runs[1]) != metrics(runs[2])


def test_metrics_after_the_checkpoint_are_written_again_not_twice(tmp_path: Path) -> None:
    run_dir = train(config(tmp_path)).run_dir
    before = metrics(run_dir)
    (run_dir / "checkpoints/latest").unlink()
    second = train(config(tmp_path, "trainer.checkpoint.every=3", "trainer.total_steps=3")).run_dir
    # As a process killed in step 5 leaves it: metrics up to 4, the newest checkpoint at 3.
    (second / "metrics.jsonl").write_bytes((run_dir / "metrics.jsonl").read_bytes())
    train(small.resume(second, "trainer.total_steps=4"))
    assert metrics(second) == before
    assert [record["step"] for record in metrics(second)] == [0, 1, 2, 3, 4]


def test_run_without_checkpoint_cannot_be_resumed(tmp_path: Path) -> None:
    run_dir = train(config(tmp_path, "trainer.total_steps=1")).run_dir
    (run_dir / "checkpoints/latest").unlink()
    with pytest.raises(GradtraceError, match="no complete checkpoint"):
        train(small.resume(run_dir))


def test_finished_run_resumes_to_itself(tmp_path: Path) -> None:
    run_dir = train(config(tmp_path, "trainer.total_steps=2")).run_dir
    before = files(run_dir, 2)
    assert train(small.resume(run_dir)).finished
    assert files(run_dir, 2) == before and len(metrics(run_dir)) == 3


def test_checkpoints_hold_no_pickles(tmp_path: Path) -> None:
    run_dir = train(config(tmp_path, "algorithm.advantage=gae", "trainer.total_steps=1")).run_dir
    suffixes = {path.suffix for path in (run_dir / "checkpoints").rglob("*") if path.is_file()}
    assert suffixes <= {".json", ".safetensors", ".jinja", ""}, suffixes
    state = load_file(run_dir / "checkpoints/step_000001/optimizer.safetensors")
    assert any(name.startswith("exp_avg_sq/") for name in state)


def test_lora_run_exports_merged_weights(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    outcome = train(config(tmp_path, "model.lora.rank=2", "trainer.total_steps=2"))
    plain = AutoModelForCausalLM.from_pretrained(outcome.run_dir / "policy").eval()
    base = AutoModelForCausalLM.from_pretrained(next((tmp_path / "runs/.cache").iterdir()))
    adapted = PeftModel.from_pretrained(base, outcome.run_dir / "checkpoints/step_000002/policy").eval()
    ids = torch.tensor([[4, 14, 5, 17]])
    torch.testing.assert_close(plain(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-5)
    with adapted.disable_adapter():
        assert not torch.allclose(plain(ids).logits, adapted(ids).logits, atol=1e-3)
