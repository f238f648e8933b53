"""A training step with every instrument on a device that is not the CPU: nothing is left behind on the host, and the
numbers are those of the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gradtrace import open_run
from gradtrace.batch import RolloutBatch
from gradtrace.metrics import Timer
from gradtrace.trace.run_files import RunFiles
from gradtrace.training.components import build_components
from gradtrace.training.host import open_instruments
from gradtrace.training.loop import Trainer
from gradtrace.training.terminal import SilentDisplay
from tests.device.standin import DEVICE, OnDevice, standin
from tests.training import small

EVERYTHING = (
    *("trainer.influence_trace.enable=true", "trainer.influence_trace.on_error=raise"),
    *("trainer.entropy_trace.enable=true", "trainer.blame.enable=true", "trainer.blame.write_every=1"),
    "actor.mini_batch_size=0",
)


@pytest.fixture(autouse=True)
def knows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradtrace.attribution import geometry

    monkeypatch.setattr(geometry, "PLAIN", (*geometry.PLAIN, OnDevice))


@dataclass
class Step:
    """One training step of a small run."""

    batch: RolloutBatch
    weights: dict[str, Tensor]
    """As they were before it."""
    metrics: dict[str, float]
    trainer: Trainer


def one_step(folder: Path, name: str, words: tuple[str, ...], like: Step | None = None) -> Step:
    """A step on a rollout of its own, or on the rollout and from the weights of another one."""
    parts = build_components(small.config(folder, *words))
    files = RunFiles(folder / name)
    steps = open_instruments(parts, files, lambda text: None)
    trainer = Trainer(parts, files, SilentDisplay(), steps)
    if like is not None:  # random first weights of adapters are other ones on another device
        parts.policy.model.load_state_dict(like.weights)
    weights = {name: value.clone() for name, value in parts.policy.model.state_dict().items()}
    timer = Timer()
    batch = like.batch if like else trainer.experience.collect(parts.generators["rollout"], timer)[0]
    metrics = trainer.train_step(batch, 1, timer)[1]
    trainer.steps.close()
    return Step(batch, weights, metrics, trainer)


SETTINGS = {
    "tracin, probe, verify": (
        *("trainer.tracin.enable=true", "trainer.tracin.val_batch_size=4"),
        *("trainer.entropy_probe.every=1", "trainer.entropy_probe.prompts=4"),
        *("trainer.entropy_probe.on_error=raise", "trainer.influence_trace.verify_every=1"),
    ),
    "ppo": ("algorithm.advantage=gae",),
    "lora, kl": ("model.lora.rank=2", "algorithm.kl_coef=0.1"),
    "exact, both credits": (
        "trainer.influence_trace.credit=both",
        "trainer.influence_trace.preconditioner_form=exact",
    ),
    "inverse": (
        "trainer.influence_trace.hessian_mode=inverse",
        "trainer.influence_trace.projection_dim_factor=4",
    ),
}


@pytest.mark.parametrize("words", SETTINGS.values(), ids=SETTINGS)
def test_a_step_on_a_device_gives_the_numbers_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    expected = one_step(tmp_path, "cpu", (*EVERYTHING, *words))
    monkeypatch.setattr("gradtrace.policy.load.choose_device", lambda name: DEVICE)
    with standin():
        found = one_step(tmp_path, "device", (*EVERYTHING, *words), expected)
        assert all(p.device == DEVICE for p in found.trainer.components.policy.model.parameters())
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
        assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-4, abs=1e-6), name
    runs = [open_run(tmp_path / name) for name in ("device", "cpu")]
    kinds = runs[1].kinds()
    assert runs[0].kinds() == kinds and {"influence_trace", "entropy_trace", "blame"} <= {*kinds}
    for kind in kinds:
        ours, theirs = (run.step(kind, 1) for run in runs)
        for column in theirs.columns:
            if np.issubdtype(theirs[column].dtype, np.floating):
                here, there = (np.nan_to_num(step[column]) for step in (ours, theirs))
                # Adam's first second moments are tiny, and rounding is divided by them.
                assert np.linalg.norm(here - there) <= 0.01 * np.linalg.norm(there) + 1e-6, f"{kind} {column}"


def test_the_backward_pass_never_makes_the_host_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs for every layer and micro-batch queues work and goes on; the host looks when a step is over."""
    monkeypatch.setattr("gradtrace.policy.load.choose_device", lambda name: DEVICE)
    counts = []
    with standin() as waits:
        for budget in (10_000, 40):  # tokens of a micro-batch: one micro-batch, or many
            words = ("trainer.influence_trace.credit=both", f"actor.token_budget={budget}")
            one_step(tmp_path, str(budget), (*EVERYTHING, *words))
            counts.append({place: n for place, n in waits.places.items() if place[0] != "to_device"})
            waits.places.clear()
    factors = ("capture", "layers", "loss_terms", "one_pass")
    hot = {"instruments/blame/response_gradients.py", *(f"attribution/factors/{name}.py" for name in factors)}
    for found in counts:
        seen = {place: n for place, n in found.items() if place[1] in hot}
        assert seen == {(what, "instruments/blame/response_gradients.py"): 1 for what in ("tolist", "to_host")}
    one, many = counts
    more = {place: many[place] - n for place, n in one.items() if many[place] != n}
    passes = more["to_host", "training/update.py"] // 2  # further micro-batches: their log-probs and entropies
    assert passes > 2
    # transformers asks its positions once per pass whether they are packed.
    assert more == {
        ("to_host", "training/update.py"): 2 * passes,
        ("_local_scalar_dense", "policy/policy.py"): passes,
    }


def test_a_checkpoint_of_a_device_opens_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("trainer.total_steps=1", "trainer.validation.every=1", "trainer.validation.prompts=2")
    monkeypatch.setattr("gradtrace.policy.load.choose_device", lambda name: DEVICE)
    with standin():
        trainer = small.trainer(tmp_path, *words)
        trainer.fit()
        folder = trainer.save(1)
        moved = {name: p.detach().cpu() for name, p in trainer.components.policy.model.named_parameters()}
    monkeypatch.undo()
    parts = build_components(small.config(tmp_path, *words), folder)
    for name, p in parts.policy.model.named_parameters():
        assert torch.equal(p, moved[name]), name
