"""What verl finds of ours in its registries, and that our losses and advantages are the same there."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradtrace.algorithms import AdvantageInputs, LossInputs, advantage, aggregate, policy_loss
from gradtrace.algorithms.registry import advantages, policy_losses
from gradtrace.config.loader import load_config
from gradtrace.errors import GradtraceError
from gradtrace.integrations.verl.cannot import check_main
from gradtrace.integrations.verl.launch.translate import translate
from tests.integrations.verl import harness

pytestmark = [pytest.mark.slow, harness.needs_verl]


@pytest.fixture(scope="module")
def verl() -> Any:
    """verl with the plugin, on CPU."""
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

    from gradtrace.integrations.verl.driver.trainer import GradtraceTrainer
    from gradtrace.integrations.verl.rank.engine import TracedFSDPEngine

    engines = EngineRegistry._engines["language_model"]["fsdp2"]
    assert engines["cpu"] is engines["cuda", "nvidia"] is engines["cuda", "gradtrace"] is TracedFSDPEngine
    assert get_trainer_cls("sync") is get_trainer_cls("gradtrace") is GradtraceTrainer
    assert PlatformRegistry.get("cpu") is not None
    assert RolloutReplicaRegistry.get("gradtrace_cpu") and get_rollout_class("gradtrace_cpu")


def test_what_is_not_traced_asynchronously_is_refused_with_what_to_use(verl: Any) -> None:
    from verl.trainer.ppo.v1.trainer_base import get_trainer_cls

    with pytest.raises(GradtraceError, match=r"trainer_mode=sync or colocate_async.*gradtrace trace import"):
        get_trainer_cls("separate_async")(verl_config())
    for sampling in ("trainer.entropy_probe.every=5", "trainer.tracin.enable=true"):
        with pytest.raises(GradtraceError, match="samples at the weights of the step"):
            get_trainer_cls("colocate_async")(verl_config(sampling))


def test_programs_of_verl_that_would_not_read_our_section_are_refused() -> None:
    module = "verl.experimental.one_step_off_policy.main_ppo"
    with pytest.raises(GradtraceError, match=r"\+gradtrace.blame.enable=true: .*one_step_off_policy"):
        check_main(["python", "-m", module, "+gradtrace.blame.enable=true"])
    check_main(["python", "-m", module])
    check_main(["python", "-m", "verl.trainer.main_ppo", "+gradtrace.blame.enable=true"])


def test_verl_accepts_a_critic(verl: Any) -> None:
    from verl.trainer.ppo.utils import need_critic

    config = verl_config("algorithm.advantage=gae", "critic.optim.lr=1e-4")
    assert need_critic(config) and not need_critic(verl_config())
    assert config.critic.strategy == "fsdp2" and config.critic.optim.lr == 1e-4


def test_the_entry_point_is_installed() -> None:
    from importlib.metadata import entry_points

    assert [e.value for e in entry_points(group="verl.plugins")] == ["gradtrace.integrations.verl.plugin"]


def test_verl_accepts_the_translation(verl: Any) -> None:
    from verl.utils.config import omega_conf_to_dataclass

    from gradtrace.integrations.verl.settings import read_settings

    config = verl_config("trainer.influence_trace.hessian_mode=identity")
    options = read_settings(config)
    assert options.influence_trace.enable and options.influence_trace.hessian_mode == "identity"
    assert options.policy_loss_options["clip_high"] == 0.28 and options.run_dir == "/runs/mine"
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.policy_loss.loss_mode == "gradtrace_ppo"


def test_a_misspelt_option_is_answered_with_the_nearest(verl: Any) -> None:
    from gradtrace.integrations.verl.settings import read_settings

    config = verl_config("verl.gradtrace.influence_trace.hesian_mode=identity")
    with pytest.raises(GradtraceError, match=r"influence_trace\.hessian_mode"):
        read_settings(config)


def test_fsdp1_is_refused_before_workers_start(verl: Any) -> None:
    from gradtrace.integrations.verl.driver.trainer import GradtraceTrainer

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

    from gradtrace.integrations.verl.rank import losses

    found = columns()
    theirs = found["log_probs"].clone().requires_grad_()
    ours = found["log_probs"].clone().requires_grad_()
    config = harness.actor_config()
    tokens = int(found["mask"].sum())
    config.global_batch_info.update(dp_size=1, batch_num_tokens=tokens, global_batch_size=4, loss_scale_factor=None)
    token = losses._extras.set(({name: found[name] for name in ("entropies", "ref_log_probs")}, {}))
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


def test_a_loss_of_the_users_file_is_known_in_every_process_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for registry in (policy_losses, advantages):  # other tests list what ships
        monkeypatch.setattr(registry, "_entries", dict(registry.entries()))
    file = tmp_path / "my_losses.py"
    file.write_text(
        "from gradtrace.algorithms import AdvantageOutputs, LossOutputs, register_advantage, register_policy_loss\n"
        "@register_policy_loss('own_loss')\n"
        "def own_loss(inputs, *, scale=1.0): return LossOutputs(-scale * inputs.advantages * inputs.log_probs)\n"
        "@register_advantage('own_mean')\n"
        "def own_mean(inputs): return AdvantageOutputs(inputs.rewards[:, None] * inputs.mask)\n"
    )
    chosen = (f"algorithm.path={file}", "algorithm.policy_loss=own_loss", "algorithm.advantage=own_mean")
    config = load_config(["engine=verl", "recipe=demo", *chosen])
    translation = translate(config, Path("/runs/mine"), "/models/mine", on_cpu=True)
    settings = translation.settings
    assert settings["actor_rollout_ref.actor.policy_loss.loss_mode"] == "gradtrace_own_loss"
    code = (
        "import verl, torch\n"
        "from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn\n"
        f"get_adv_estimator_fn({settings['algorithm.adv_estimator']!r})\n"
        "loss = get_policy_loss_fn('gradtrace_own_loss')\n"
        "info = dict(dp_size=1, batch_num_tokens=2, global_batch_size=1, loss_scale_factor=None)\n"
        "config = type('Config', (), {'global_batch_info': info})\n"
        "ones = torch.ones(1, 2)\n"
        "print(float(loss(-ones, -3 * ones, 2 * ones, ones, config=config)[0]))\n"
    )
    env = os.environ | translation.environment
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split()[-1] == "6.0", done.stderr


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
    found, _ = get_adv_estimator_fn(f"gradtrace_{name}")(token_level_rewards=rewards, response_mask=mask, index=uids)
    inputs = AdvantageInputs(rewards.sum(1), torch.tensor([1, 0, 1, 0]), mask)
    assert torch.allclose(found, advantage(name)(inputs).advantages)


def test_a_loss_with_a_trace_on_verls_own_engine_is_an_error(verl: Any) -> None:
    from gradtrace.instruments.influence import INFLUENCE_TRACE, InfluenceTraceConfig
    from gradtrace.integrations.verl.rank.losses import GradtraceLoss

    loss = GradtraceLoss(harness.actor_config(), instruments={INFLUENCE_TRACE: InfluenceTraceConfig(enable=True)})
    with pytest.raises(GradtraceError, match="Workers must load the plugin"):
        loss({}, {})


@pytest.mark.parametrize(
    "mode",
    ["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"],
)
def test_selection_weighs_tokens_as_verls_aggregation_does(verl: Any, mode: str) -> None:
    from verl.trainer.ppo.core_algos import agg_loss

    from gradtrace.integrations.verl.rank.losses import batch_weights

    batch = harness.rollout()
    values, mask = torch.rand(batch.responses.shape), batch.response_mask
    actor = harness.actor_config(loss_agg_mode=mode, loss_scale_factor=20)
    expected = agg_loss(values, mask.long(), mode, loss_scale_factor=20)
    assert torch.allclose((batch_weights(mask, actor) * values).sum(), expected, rtol=1e-5)


def test_every_response_is_dealt_to_one_rank_and_ranks_have_equally_many(verl: Any) -> None:
    from gradtrace.integrations.verl.rank.sequences import OWN, dealt_sequences, rows_of

    whole = harness.rollout(groups=3, n=5)
    weights = torch.rand(whole.responses.shape)
    for chosen in (torch.arange(15), torch.tensor([3, 8, 9]), torch.tensor([4])):
        batch, columns = whole.select(chosen), {"weights": weights[chosen]}
        ids = batch.response_ids
        for ranks, multiple in ((1, 1), (2, 3), (4, 2)):
            found = [dealt_sequences(batch, ranks, place, multiple, columns) for place in range(ranks)]
            sizes = {len(rows_of(data)) for data in found}
            assert len(sizes) == 1 and sizes.pop() % multiple == 0
            dealt = torch.cat([rows_of(data) for data in found])
            assert sorted(dealt[dealt >= 0].tolist()) == list(range(len(batch)))
            for data in found:
                fields = (data[name].unbind() for name in ("prompts", "responses", f"{OWN}weights"))
                for row, prompt, response, own in zip(rows_of(data).tolist(), *fields, strict=True):
                    assert len(response) == len(own) > 0 and len(prompt)
                    if row >= 0:
                        assert torch.equal(own, weights[chosen[row], : len(own)]) and response.tolist() == ids[row]
                        assert prompt.tolist() == batch.prompts[int(batch.group[row])]


def test_a_shared_sequence_travels_without_the_rest_of_its_mini_batch(verl: Any) -> None:
    from gradtrace.attribution.collectives import Ranks
    from gradtrace.integrations.verl.rank.sequences import SharedSequences

    batch = harness.rollout()
    batch = batch.replace(old_log_probs=batch.sampler_log_probs, advantages=torch.zeros(batch.responses.shape))
    data = harness.tensordict(batch, list(range(len(batch))), None, sequences=len(batch))
    shared = SharedSequences(None, data, [3, 5], Ranks())
    assert sorted(shared.held) == sorted(shared.sequences) == [3, 5]
    for fields in shared.held.values():
        for name, values in fields.items():
            assert values.untyped_storage().nbytes() == values.nbytes, f"{name} is a view, and all of it would be sent"


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


def test_a_paused_server_begins_nothing_and_stops_at_the_tokens_it_is_told(verl: Any, tmp_path: Path) -> None:
    """verl exchanges weights while requests wait (its asynchronous trainer), and tool parsers end turns."""
    from gradtrace.integrations.verl.cpu.rollout import Server

    server = Server(str(harness.model_folder(tmp_path / "model")), response_length=40, seed=0)
    settings = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "stop_token_ids": list(range(5, 30))}

    async def ask() -> Any:
        await server.load(server.model.state_dict(), 3)
        await server.abort_all_requests()
        request = asyncio.create_task(server.generate("0", [5, 6, 7], settings))
        done, _ = await asyncio.wait([request], timeout=0.3)
        assert not done
        await server.load(server.model.state_dict(), 4)
        await server.resume_generation()
        return await request

    output = asyncio.run(ask())
    assert output.extra_fields["global_steps"] == 4
    assert 5 <= output.token_ids[-1] < 30 and all(not 5 <= token < 30 for token in output.token_ids[:-1])


def test_verls_agent_loop_calls_the_calculator_as_the_embedded_loop_does(verl: Any) -> None:
    """Whatever a policy that has learnt nothing writes before </calc>: tags, padding, a line break."""
    from gradtrace.integrations.verl.launch.calculator_tool import CallParser, calculate
    from gradtrace.tasks.calculator import VOCABULARY, Calculator, encode

    parser = CallParser(None)
    odd = [VOCABULARY.index(token) for token in ("<pad>", "<unk>", "<eos>")]
    for ids in (encode("<calc>12*3</calc>"), [*odd, *encode("7-</calc>")]):
        _, (call,) = asyncio.run(parser.extract_tool_calls(ids))
        expected = Calculator().reply(ids)
        assert expected is not None
        assert encode(calculate(**json.loads(call.arguments))) == expected[0]
    assert asyncio.run(parser.extract_tool_calls(encode("36"))) == ("36", [])
    assert parser.stop_token_ids == list(Calculator.stop_token_ids)


# ---------------------------------------------------------------- a job of one's own

SCRIPT = Path(__file__).parents[3] / "examples" / "launch" / "own_verl_job.sh"


def words_of_the_script(folder: Path, *more: str) -> list[str]:
    """What the script says to main_ppo, as bash reads it."""
    python = folder / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "MODEL": "/model", "DATA": "/data"}
    done = subprocess.run(["bash", str(SCRIPT), *more], env=environment, capture_output=True, text=True, check=True)
    module, *words = done.stdout.splitlines()[1:]
    assert module == "verl.trainer.main_ppo"
    return words


def test_the_documented_command_is_the_script() -> None:
    command = SCRIPT.read_text().split("set -euo pipefail\n")[1]
    assert f"```bash\n{command}```" in (SCRIPT.parents[2] / "docs" / "verl.md").read_text()


def test_the_command_of_a_job_of_ones_own_is_understood(verl: Any, tmp_path: Path) -> None:
    """Every key exists in verl's configuration, ours are read, and the trainer and engine are those that we replace."""
    from hydra import compose, initialize_config_dir

    from gradtrace.integrations.verl import cpu
    from gradtrace.integrations.verl.launch.translate import hydra_value
    from gradtrace.integrations.verl.settings import read_settings

    on_cpu = [f"{key}={hydra_value(value)}" for key, value in cpu.settings(2).items()]
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        for more in ([], on_cpu):
            config = compose("ppo_trainer", words_of_the_script(tmp_path, *more))
            options = read_settings(config)
            assert options.influence_trace.enable and options.entropy_trace.enable
            assert options.run_dir == "runs/mine" and not options.entropy_probe.every
            assert config.trainer.use_v1 and config.trainer.v1.trainer_mode == "sync"
            assert config.actor_rollout_ref.actor.strategy == "fsdp2"


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["verl.actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov"], "token terms"),
        (["verl.actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"], "single_turn_agent"),
    ],
)
def test_what_the_probe_cannot_do_is_refused_before_a_worker_starts(
    verl: Any, overrides: list[str], reason: str
) -> None:
    from verl.trainer.ppo.v1.trainer_base import get_trainer_cls

    with pytest.raises(GradtraceError, match=reason):
        get_trainer_cls("sync")(verl_config("trainer.entropy_probe.every=5", *overrides))
