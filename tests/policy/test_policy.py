"""The policy, its reference and its critic."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradtrace.errors import GradtraceError
from gradtrace.metrics import Timer
from gradtrace.policy.load import choose_device
from gradtrace.policy.loss import fill_statistics
from gradtrace.policy.microbatch import WORTH_PACKING, MicroBatches, padding_share
from gradtrace.tasks.rewards import RewardFunction
from gradtrace.training.loop import Trainer
from tests.training.small import components, trainer


def step(run: Trainer, number: int = 1) -> dict[str, float]:
    batch, _ = run.experience.collect(run.components.generators["rollout"], Timer())
    return run.train_step(batch, number, Timer())[1]


@pytest.mark.parametrize("lora", [0, 2])
def test_reference_stays_where_the_policy_started(tmp_path: Path, lora: int) -> None:
    run = trainer(tmp_path, "algorithm.kl_coef=0.1", f"model.lora.rank={lora}")
    batch, _ = run.experience.collect(run.components.generators["rollout"], Timer())
    micro_batches = MicroBatches(batch, 10**6)
    rows = torch.arange(len(batch))
    start = fill_statistics(run.components.policy, batch, micro_batches, rows).old_log_probs
    for number in (1, 2, 3):
        metrics = step(run, number)
    assert metrics["actor/kl_loss"] > 0
    now = fill_statistics(run.components.policy, batch, micro_batches, rows).old_log_probs
    reference = run.components.reference.add_log_probs(batch, micro_batches(rows)).ref_log_probs  # type: ignore[union-attr]
    assert not torch.allclose(now, start, atol=1e-3)
    torch.testing.assert_close(reference, start, rtol=1e-4, atol=1e-5)


def test_reference_is_loaded_only_when_something_asks_for_it(tmp_path: Path) -> None:
    assert components(tmp_path).reference is None
    assert components(tmp_path, "algorithm.policy_loss=archer").reference is not None
    no_kl = ["algorithm.policy_loss=archer", "algorithm.policy_loss_options.kl_low_entropy=0"]
    assert components(tmp_path, *no_kl).reference is None
    assert components(
        tmp_path, "algorithm.advantage=reinforce_plus_plus", "algorithm.advantage_options.kl_coef=0.1"
    ).reference


def test_lora_trains_adapters_only(tmp_path: Path) -> None:
    run = trainer(tmp_path, "model.lora.rank=2")
    before = {name: p.detach().clone() for name, p in run.components.policy.model.named_parameters()}
    step(run)
    step(run, 2)
    for name, parameter in run.components.policy.model.named_parameters():
        assert ("lora_" in name) == (not torch.equal(parameter, before[name])), name


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    weights = []
    for on in ("false", "true"):
        run = trainer(tmp_path, f"model.gradient_checkpointing={on}", "actor.share_prompts=never")
        step(run)
        weights.append(torch.cat([p.detach().flatten() for p in run.components.policy.model.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("layout", ["actor.packing=always", "actor.share_prompts=always"])
def test_checkpointing_of_packed_rows_is_refused_before_it_fails(tmp_path: Path, layout: str) -> None:
    with pytest.raises(GradtraceError, match=r"gradient_checkpointing.*actor\.packing=never"):
        components(tmp_path, "model.gradient_checkpointing=true", layout)


def test_automatic_packing_leaves_checkpointed_models_alone(tmp_path: Path) -> None:
    run = trainer(tmp_path, "model.gradient_checkpointing=true", "rollout.max_new_tokens=24")
    batch, _ = run.experience.collect(run.components.generators["rollout"], Timer())
    assert padding_share(batch) > WORTH_PACKING, "otherwise nothing would be packed anyway"
    run.train_step(batch, 1, Timer())


@pytest.mark.parametrize("layout", ["actor.packing=always", "actor.share_prompts=always"])
def test_training_does_not_depend_on_the_layout(tmp_path: Path, layout: str) -> None:
    weights = []
    for options in (["actor.share_prompts=never"], [layout]):
        run = trainer(tmp_path, "actor.optim.lr=1e-3", *options)
        step(run)
        weights.append(torch.cat([p.detach().flatten() for p in run.components.policy.model.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-3, atol=1e-5)


def test_policy_has_no_dropout_and_bad_targets_are_named(tmp_path: Path) -> None:
    model = components(tmp_path).policy.model
    assert all(module.p == 0 for module in model.modules() if isinstance(module, torch.nn.Dropout))
    with pytest.raises(GradtraceError, match=r"model\.lora\.target_modules.*nonsense"):
        components(tmp_path, "model.lora.rank=2", "model.lora.target_modules=[nonsense]")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_missing_gpu_is_said() -> None:
    with pytest.raises(GradtraceError, match=r"model\.device=cuda"):
        choose_device("cuda")


def test_value_of_a_token_depends_on_what_came_before_it_only(tmp_path: Path) -> None:
    run = trainer(tmp_path, "algorithm.advantage=gae", "critic.optim.lr=1e-2")
    step(run)  # the head starts at zero
    batch, _ = run.experience.collect(run.components.generators["rollout"], Timer())
    critic = run.components.critic
    assert critic is not None
    values = critic.add_values(batch, MicroBatches(batch, 10**6)).values
    responses = batch.responses.clone()
    responses[:, 2:] = 5
    changed = batch.replace(responses=responses * batch.response_mask)
    again = critic.add_values(changed, MicroBatches(changed, 10**6)).values
    torch.testing.assert_close(values[:, :3], again[:, :3])  # type: ignore[index]
    assert not torch.allclose(values[:, 3:], again[:, 3:])  # type: ignore[index]
    assert bool((values[~batch.response_mask] == 0).all())  # type: ignore[index]


def test_critic_learns_the_returns(tmp_path: Path) -> None:
    run = trainer(tmp_path, "algorithm.advantage=gae", "critic.optim.lr=1e-2", "critic.value_clip=0")
    run.experience.reward = RewardFunction("three", lambda response, item: 3.0)
    losses = [step(run, number)["critic/vf_loss"] for number in range(1, 25)]
    assert losses[-1] < 0.1 * losses[0]


def test_critic_warms_up_before_the_policy_moves(tmp_path: Path) -> None:
    run = trainer(tmp_path, "algorithm.advantage=gae", "critic.warmup_steps=2")
    before = [p.detach().clone() for p in run.components.policy.model.parameters()]
    step(run, 1)
    step(run, 2)
    assert all(torch.equal(a, b) for a, b in zip(before, run.components.policy.model.parameters(), strict=True))
    step(run, 3)
    assert not all(torch.equal(a, b) for a, b in zip(before, run.components.policy.model.parameters(), strict=True))
