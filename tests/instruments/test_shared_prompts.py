"""Updates that compute a prompt once for all its responses: traces are the same, and watching changes no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gradtrace import open_run
from gradtrace.instruments.contract import Backward
from gradtrace.instruments.influence.capture import InfluenceCapture
from gradtrace.metrics import Timer
from gradtrace.policy.microbatch import MicroBatches
from gradtrace.training import loop
from gradtrace.training.host import open_instruments
from tests.instruments.test_traces import ONE_STEP, columns, influence, run, weights
from tests.training import small

TRACED = ("trainer.influence_trace.enable=true", "trainer.influence_trace.target=log_prob")
"""Scores from captured factors."""
LAYERS = ("task.arithmetic.layers=2", "task.arithmetic.hidden_size=32")
"""With one layer both credits are nearly the same."""
KNOBS = {
    "loss-terms": (),
    "own-response-left-out": ("exclude_self_response=true",),
    "all-selected": ("accepted_rejected_scope=all_selected",),
    "both-identity": ("credit=both", "hessian_mode=identity"),
    "log-prob-reward": ("output_function=log_prob_reward",),
    "position": ("credit=position",),
    "both-inverse": ("credit=both", "hessian_mode=inverse"),
    "loss-term-inverse": ("credit=loss_term", "hessian_mode=inverse"),
    "older-target": ("target=output_function", "credit=both"),
    "scope-pass": ("scope_pass=true",),
    "projected": ("projection_dim_factor=2",),
    "sum-of-tokens": ("response_reduction=sum",),
    "with-the-head": ("module_name_filter=[mlp,attn,lm_head]",),
    "groups-in-several-passes": ("profile_timing=true",),
}


@pytest.mark.parametrize("knobs", KNOBS.values(), ids=KNOBS)
def test_scores_do_not_depend_on_sharing(tmp_path: Path, knobs: tuple[str, ...]) -> None:
    """The second mini-batch is off policy, where step and target have passes of their own."""
    found = {}
    for sharing in ("always", "never"):
        (tmp_path / sharing).mkdir()
        more = (*LAYERS, *TRACED, *ONE_STEP, *influence(*knobs), "actor.optim.lr=1e-5")
        more = (*more, "actor.token_budget=20") if "profile_timing=true" in knobs else more
        found[sharing] = columns(run(tmp_path / sharing, *more, f"actor.share_prompts={sharing}"))
    shared, apart = found["always"], found["never"]
    assert np.array_equal(shared["row"], apart["row"]) and set(apart["optimizer_step"]) <= {0, 1}
    scored = [name for name in apart if name.startswith("influence") and apart[name].dtype == np.float32]
    assert any(name != "influence_pairwise" for name in scored)
    for name in [*scored, "response_kernel"] if "response_kernel" in apart else scored:
        scale = np.nanmax(np.abs(apart[name]))
        assert scale > 0, name
        # Adam divides by second moments, and what is nearly zero is mostly rounding.
        np.testing.assert_allclose(shared[name] / scale, apart[name] / scale, atol=2e-3, err_msg=name)


def test_by_default_prompts_are_shared_and_watching_changes_no_bit(tmp_path: Path) -> None:
    watch = ("trainer.traces=true", "trainer.blame.enable=true", "trainer.blame.write_every=1", *TRACED)
    layouts: list[str] = []

    class Recorded(MicroBatches):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            layouts.append(self.layout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "MicroBatches", Recorded)
        plain = weights(run(tmp_path, "trainer.total_steps=3", *LAYERS))
        watched_dir = run(tmp_path, "trainer.total_steps=3", *LAYERS, *watch)
    assert layouts == ["shared"] * 6
    assert open_run(watched_dir).steps("influence_trace") == open_run(watched_dir).steps("blame") == [1, 2, 3]
    for name, tensor in weights(watched_dir).items():
        assert torch.equal(tensor, plain[name]), name


def test_passes_of_training_that_share_prompts_are_not_captured(tmp_path: Path) -> None:
    asked: list[Tensor] = []
    around = InfluenceCapture.around

    def noted(self: InfluenceCapture, traced: Backward, role: Any, rides: bool) -> Any:
        assert traced.prompt_rows is None
        asked.append(traced.rows)
        return around(self, traced, role, rides)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InfluenceCapture, "around", noted)
        step = columns(run(tmp_path, *LAYERS, *TRACED, *ONE_STEP))
    assert len(step["row"]) and set(step["row"].tolist()) <= set(torch.cat(asked).tolist())


def test_norms_and_sketches_of_blame_do_not_depend_on_sharing(tmp_path: Path) -> None:
    found = []
    for sharing in ("always", "never"):
        (tmp_path / sharing).mkdir()
        blame = ("trainer.blame.enable=true", "trainer.blame.write_every=1", *ONE_STEP, *LAYERS)
        found.append(columns(run(tmp_path / sharing, *blame, f"actor.share_prompts={sharing}"), "blame"))
    shared, apart = found
    compared = [name for name, values in apart.items() if values.dtype.kind == "f" and name in shared]
    assert {"grad_norm", "product_siblings", "token_grad_share"} <= set(compared)
    for name in compared:
        scale = np.nanmax(np.abs(apart[name])) or 1.0
        np.testing.assert_allclose(shared[name] / scale, apart[name] / scale, atol=2e-4, err_msg=name)


@pytest.mark.parametrize(
    ("override", "layout"),
    [
        ("actor.share_prompts=auto", "shared"),
        ("actor.share_prompts=always", "shared"),
        ("actor.share_prompts=never", "padded"),
        ("actor.packing=never", "padded"),
        ("model.gradient_checkpointing=true", "padded"),
        ("model.attention=eager", "padded"),
    ],
)
def test_where_prompts_are_shared(tmp_path: Path, override: str, layout: str) -> None:
    trainer = small.trainer(tmp_path, "rollout.max_new_tokens=12", override)
    batch, _ = trainer.experience.collect(trainer.components.generators["rollout"], Timer())
    assert trainer._layout(batch) == layout


def test_long_responses_and_sliding_windows_keep_their_prompts(tmp_path: Path) -> None:
    trainer = small.trainer(tmp_path)
    batch, _ = trainer.experience.collect(trainer.components.generators["rollout"], Timer())
    assert trainer._layout(batch) == "shared"
    short = batch.replace(prompts=[prompt[:1] for prompt in batch.prompts])
    assert trainer._layout(short) != "shared", "there is hardly anything to save"
    for module in trainer.components.policy.model.modules():
        if hasattr(module, "sliding_window"):
            module.sliding_window = 4
    again = small.trainer(tmp_path)
    again.components.policy.model = trainer.components.policy.model
    assert again._layout(batch) != "shared"


def test_a_trace_of_prompts_of_one_token(tmp_path: Path) -> None:
    """Nothing of such a prompt is shared: its one token stands before each response."""
    found = []
    for layout in ("shared", "padded"):
        trainer = small.trainer(
            tmp_path, *LAYERS, *TRACED, *ONE_STEP, *influence("credit=both"), "actor.mini_batch_size=0"
        )
        trainer.steps = open_instruments(trainer.components, trainer.files, print)
        trainer.steps.start(0)
        trainer._layout = lambda batch, layout=layout: layout  # type: ignore[method-assign]
        batch, _ = trainer.experience.collect(trainer.components.generators["rollout"], Timer())
        batch = batch.replace(prompts=[prompt[-1:] for prompt in batch.prompts])
        trainer.train_step(batch, 1, Timer())
        trainer.steps.close()
        found.append(columns(trainer.files.path))
    for name in ("influence_position", "influence_loss_term"):
        scale = np.nanmax(np.abs(found[1][name]))
        assert scale > 0, name
        np.testing.assert_allclose(found[0][name] / scale, found[1][name] / scale, atol=2e-3, err_msg=name)
