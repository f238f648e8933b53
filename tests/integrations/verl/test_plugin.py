"""What verl finds of ours in its registries, and that our losses and advantages are the same there."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradtrace.algorithms import AdvantageInputs, LossInputs, advantage, aggregate, policy_loss
from gradtrace.config_loader import load_config
from gradtrace.errors import GradtraceError
from gradtrace.integrations.verl.translate import translate
from tests.integrations.verl import harness

pytestmark = [pytest.mark.slow, harness.needs_verl]


@pytest.fixture(scope="module")
def verl() -> Any:
    """verl with the plugin, on CPU."""
    os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "gradtrace.integrations.verl"}
    import verl

    return verl


def verl_config(*overrides: str) -> Any:
    """The whole configuration that verl composes from our translation."""
    import verl
    from hydra import compose, initialize_config_dir

    config = load_config(["engine=verl", "recipe=demo", "cluster.num_workers=2", *overrides])
    translation = translate(config, Path("/runs/mine"), "/models/mine", on_cpu=True)
    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        return compose("ppo_trainer", translation.overrides())


def test_everything_is_registered(verl: Any) -> None:
    from verl.plugin.platform.platform_manager import PlatformRegistry
    from verl.trainer.ppo.v1.trainer_base import get_trainer_cls
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from gradtrace.integrations.verl.engine import TracedFSDPEngine
    from gradtrace.integrations.verl.trainer import GradtraceTrainer

    engines = EngineRegistry._engines["language_model"]["fsdp2"]
    assert engines["cpu"] is engines["cuda", "nvidia"] is engines["cuda", "gradtrace"] is TracedFSDPEngine
    assert get_trainer_cls("sync") is get_trainer_cls("gradtrace") is GradtraceTrainer
    assert PlatformRegistry.get("cpu") is not None
    assert RolloutReplicaRegistry.get("gradtrace_cpu") and get_rollout_class("gradtrace_cpu")


def test_the_entry_point_is_installed() -> None:
    from importlib.metadata import entry_points

    assert [e.value for e in entry_points(group="verl.plugins")] == ["gradtrace.integrations.verl.plugin"]


def test_verl_accepts_the_translation(verl: Any) -> None:
    from verl.utils.config import omega_conf_to_dataclass

    from gradtrace.integrations.verl.options import read_options

    config = verl_config("trainer.influence_trace.hessian_mode=identity")
    options = read_options(config)
    assert options.influence_trace.enable and options.influence_trace.hessian_mode == "identity"
    assert options.policy_loss_options["clip_high"] == 0.28 and options.run_dir == "/runs/mine"
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.policy_loss.loss_mode == "gradtrace_ppo"


def test_a_misspelt_option_is_answered_with_the_nearest(verl: Any) -> None:
    from gradtrace.integrations.verl.options import read_options

    config = verl_config("verl.gradtrace.influence_trace.hesian_mode=identity")
    with pytest.raises(GradtraceError, match=r"influence_trace\.hessian_mode"):
        read_options(config)


def test_fsdp1_is_refused_before_workers_start(verl: Any) -> None:
    from gradtrace.integrations.verl.trainer import GradtraceTrainer

    with pytest.raises(GradtraceError, match="strategy=fsdp2"):
        GradtraceTrainer(verl_config("verl.actor_rollout_ref.actor.strategy=fsdp"))


def columns(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([5, 3, 6, 1])
    mask = torch.arange(6) < lengths[:, None]

    def noise(scale: float) -> torch.Tensor:
        return torch.randn(4, 6, generator=generator) * scale * mask

    old = noise(0.5) - 1.0
    return {
        "log_probs": old + noise(0.4),
        "old_log_probs": old,
        "ref_log_probs": old + noise(0.3),
        "entropies": noise(1.0).abs(),
        "advantages": noise(1.0),
        "mask": mask,
    }


@pytest.mark.parametrize("name", ["archer", "ppo", "gspo", "cispo"])
def test_losses_and_their_gradients_are_ours(verl: Any, name: str) -> None:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    from gradtrace.integrations.verl import losses

    found = columns()
    theirs = found["log_probs"].clone().requires_grad_()
    ours = found["log_probs"].clone().requires_grad_()
    config = harness.actor_config()
    tokens = int(found["mask"].sum())
    config.global_batch_info.update(
        dp_size=1, batch_num_tokens=tokens, global_batch_size=4, loss_scale_factor=None
    )
    token = losses._extras.set(losses.Extras(found["entropies"], found["ref_log_probs"], {}))
    value, metrics = get_policy_loss_fn(f"gradtrace_{name}")(
        old_log_prob=found["old_log_probs"],
        log_prob=theirs,
        advantages=found["advantages"],
        response_mask=found["mask"],
        loss_agg_mode="token-mean",
        config=config,
    )
    losses._extras.reset(token)
    inputs = LossInputs(**{**found, "log_probs": ours})
    expected = aggregate(policy_loss(name)(inputs).loss, found["mask"], "token_mean")
    value.backward()
    expected.backward()
    assert torch.allclose(value, expected, atol=1e-7) and torch.allclose(theirs.grad, ours.grad, atol=1e-7)
    assert "actor/pg_clipfrac" in metrics


def test_archer_without_entropies_says_what_is_missing(verl: Any) -> None:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    found = columns()
    with pytest.raises(GradtraceError, match="calculate_entropy=true"):
        get_policy_loss_fn("archer")(
            found["old_log_probs"], found["log_probs"], found["advantages"], found["mask"], config=None
        )


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_advantages_are_ours(verl: Any, name: str) -> None:
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    mask = columns()["mask"]
    rewards = torch.zeros(4, 6)
    rewards[torch.arange(4), mask.sum(1) - 1] = torch.tensor([1.0, 0.0, 0.5, 0.25])
    uids = np.array(["b", "a", "b", "a"], dtype=object)
    found, _ = get_adv_estimator_fn(f"gradtrace_{name}")(
        token_level_rewards=rewards, response_mask=mask, index=uids
    )
    inputs = AdvantageInputs(rewards.sum(1), torch.tensor([1, 0, 1, 0]), mask)
    assert torch.allclose(found, advantage(name)(inputs).advantages)


def test_a_loss_with_a_trace_on_verls_own_engine_is_an_error(verl: Any) -> None:
    from gradtrace.config import InfluenceTraceConfig
    from gradtrace.integrations.verl.losses import GradtraceLoss

    loss = GradtraceLoss(harness.actor_config(), influence=InfluenceTraceConfig(enable=True))
    with pytest.raises(GradtraceError, match="Workers must load the plugin"):
        loss({}, {})


def test_waiting_requests_are_generated_in_one_batch(verl: Any, tmp_path: Path) -> None:
    from gradtrace.integrations.verl.cpu.rollout import Server

    server = Server(str(harness.model_folder(tmp_path / "model")), response_length=6, seed=0)
    sizes = []
    generate = server.sampler.generate

    def counted(prompts: list[list[int]], *args: Any, **options: Any) -> Any:
        sizes.append(len(prompts))
        return generate(prompts, *args, **options)

    server.sampler.generate = counted  # type: ignore[method-assign]
    settings = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}

    async def ask() -> list[Any]:
        await server.load(server.model.state_dict(), 3)
        return await asyncio.gather(*(server.generate(str(i), [5, 6, 7 + i], settings) for i in range(8)))

    outputs = asyncio.run(ask())
    assert sizes == [8]
    for output in outputs:
        assert 1 <= len(output.token_ids) <= 6 and len(output.log_probs) == len(output.token_ids)
        assert output.extra_fields["global_steps"] == 3
