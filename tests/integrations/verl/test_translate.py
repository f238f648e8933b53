"""From our configuration to verl's: everything is carried over or refused, nothing is lost in silence."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from gradtrace.config.loader import load_config, recipes
from gradtrace.config.root import Config
from gradtrace.errors import GradtraceError
from gradtrace.integrations.verl.launch.job import show
from gradtrace.integrations.verl.launch.translate import (
    REFUSED,
    Translation,
    hydra_value,
    leaves,
    translate,
    value_at,
)


def translated(*overrides: str, on_cpu: bool = True) -> Translation:
    config = load_config(["engine=verl", "model.path=.", *overrides])
    return translate(config, Path("/runs/mine"), "/models/mine", on_cpu)


def test_settings_arrive_under_their_names_in_verl() -> None:
    found = translated(
        "cluster.num_workers=4",
        "cluster.nodes=2",
        "rollout.n=16",
        "actor.mini_batch_size=16",
        "actor.epochs=3",
        "algorithm.aggregation=fixed_length",
        "algorithm.kl_coef=0.01",
        "actor.optim.lr=1e-5",
        "trainer.influence_trace.hessian_mode=identity",
    ).settings
    assert found["trainer.n_gpus_per_node"] == 4 and found["trainer.nnodes"] == 2
    assert found["actor_rollout_ref.rollout.n"] == 16
    assert found["actor_rollout_ref.actor.ppo_mini_batch_size"] == 16
    assert found["actor_rollout_ref.actor.ppo_epochs"] == 3
    assert found["actor_rollout_ref.actor.loss_agg_mode"] == "seq-mean-token-sum-norm"
    assert found["actor_rollout_ref.actor.loss_scale_factor"] == 20
    assert found["actor_rollout_ref.actor.use_kl_loss"] is True
    assert found["actor_rollout_ref.actor.optim.lr"] == 1e-5
    assert found["+gradtrace.influence_trace"]["hessian_mode"] == "identity"


@pytest.mark.parametrize("recipe", recipes())
def test_every_recipe_can_run_on_verl(recipe: str) -> None:
    settings = translated(f"recipe={recipe}", "cluster.num_workers=2", "data.train=[x.jsonl]").settings
    assert settings["trainer.total_training_steps"] >= 1


def test_ppos_critic_becomes_verls() -> None:
    found = translated(
        "algorithm.advantage=gae",
        "algorithm.advantage_options.lam=0.9",
        "critic.optim.lr=1e-4",
        "critic.value_clip=0.3",
        "critic.warmup_steps=2",
    ).settings
    assert found["algorithm.adv_estimator"] == "gae" and found["algorithm.lam"] == 0.9
    assert found["critic.optim.lr"] == 1e-4 and found["critic.cliprange_value"] == 0.3
    assert found["critic.model.path"] == "/models/mine" and found["trainer.critic_warmup"] == 2
    assert "critic.model.path" not in translated().settings


def test_turns_become_verls_agent_loop_with_tools() -> None:
    found = translated("recipe=calculator").settings
    prefix = "actor_rollout_ref.rollout"
    assert found[f"{prefix}.agent.default_agent_loop"] == "tool_agent"
    assert found[f"{prefix}.multi_turn.max_assistant_turns"] == 3
    assert Path(found[f"{prefix}.multi_turn.function_tool_path"]).is_file()
    assert f"{prefix}.agent.default_agent_loop" not in translated().settings


def test_options_of_verl_pass_through_and_win() -> None:
    found = translated(
        "verl.actor_rollout_ref.actor.fsdp_config.param_offload=true", "verl.trainer.save_freq=7"
    ).settings
    assert found["++actor_rollout_ref.actor.fsdp_config.param_offload"] is True
    assert found["trainer.save_freq"] == 7


def test_workers_get_what_they_need_through_ray() -> None:
    found = translated("cluster.pg_timeout_seconds=90")
    prefix = "+ray_kwargs.ray_init.runtime_env.env_vars"
    assert found.settings[f"{prefix}.GRADTRACE_PG_TIMEOUT_SECONDS"] == "90"
    assert found.settings[f"{prefix}.VERL_USE_EXTERNAL_MODULES"] == "gradtrace.integrations.verl"
    assert "VERL_PLATFORM" not in translated(on_cpu=False).environment


def test_blame_is_carried_over_and_on_with_traces() -> None:
    found = translated("trainer.traces=true", "trainer.blame.write_every=2").settings
    assert found["+gradtrace.blame"] == {"enable": True, "write_every": 2}


def test_the_entropy_probe_is_carried_over() -> None:
    found = translated("trainer.entropy_probe.every=5", "trainer.validation.prompts=8").settings
    assert found["+gradtrace.entropy_probe"] == {"every": 5}
    assert found["data.val_max_samples"] == 8  # validation keeps its prompts, the file has those of the probe as well


def test_selection_draws_from_prompts_that_the_launcher_writes() -> None:
    found = translated("trainer.tracin.enable=true", "trainer.tracin.selection=positive").settings
    assert found["+gradtrace.tracin"] == {
        "enable": True,
        "selection": "positive",
        "val_files": ["/runs/mine/data/tracin_validation.parquet"],
    }
    assert "+gradtrace.tracin" not in translated().settings


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("trainer.tracin.method=tangent", "forward mode does not go through"),
        ("trainer.tracin.train_on_validation=true", "validation rollouts are outside of it"),
        ("trainer.tracin.parameters=all", "hooks on linear layers"),
        ("actor.share_prompts=always", "no such layout"),
        ("actor.optim.schedule=linear", "constant and cosine only"),
        ("algorithm.advantage=reinforce_plus_plus", "which our estimators do not get"),
        ("algorithm.advantage_options.kl_coef=0.1", "verl.algorithm.use_kl_in_reward"),
        ("algorithm.advantage_options.whiten_advantages=false", "always whitens"),
        ("actor.mini_batch_size=7", "no multiple"),
        ("cluster.num_workers=5", "dealt evenly"),
        ("critic.optim.schedule=linear", "constant and cosine only"),
        ("trainer.influence_trace.scope_pass=true", "one mini-batch at a time"),
        ("trainer.influence_trace.verify_every=5", "run `gradtrace verify RUN` on a checkpoint"),
    ],
)
def test_what_cannot_be_carried_over_is_refused_with_the_reason(override: str, reason: str) -> None:
    apart = ["trainer.influence_trace.enable=false", "trainer.blame.enable=false"]
    more = apart if "share_prompts" in override else []
    more = more + (["trainer.tracin.enable=true"] if "tracin" in override else [])
    more = more + (["trainer.influence_trace.credit=position"] if "scope_pass" in override else [])
    more = more + (["algorithm.advantage=gae"] if "advantage_options" in override else [])
    more = more + (["algorithm.advantage_options.kl_coef=0.1"] if "plus_plus" in override else [])
    with pytest.raises(GradtraceError, match=reason):
        translated(override, *more)


def test_every_refused_key_exists() -> None:
    keys = set(leaves())
    assert set(REFUSED) <= keys
    for key in keys:
        value_at(Config(), key)


def test_cfg_shows_what_verl_is_told() -> None:
    text = show(load_config(["engine=verl", "recipe=demo", "cluster.num_workers=2"]))
    ours, theirs = text.split("# What verl is told:\n")
    assert yaml.safe_load(ours)["cluster"]["num_workers"] == 2
    assert yaml.safe_load(theirs)["verl"]["trainer.n_gpus_per_node"] == 2


def test_cluster_settings_without_the_engine_are_an_error() -> None:
    with pytest.raises(GradtraceError, match="engine=verl"):
        load_config(["recipe=demo", "cluster.num_workers=2"])


def test_values_survive_the_command_line() -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    for value in (
        True,
        None,
        1e-6,
        [0.9, 0.99],
        {"a": 1, "b": "x y"},
        "{% for m in x %}{{ m['c'] }}{% endfor %}",
    ):
        parsed = OverridesParser.create().parse_override(f"key={hydra_value(value)}").value()
        assert parsed == value or str(parsed) == str(value)


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("verl.trainer.save_frequency=3", "verl.trainer.save_freq"),
        ("verl.actor_rollout_ref.actr.ppo_epochs=2", "verl.actor_rollout_ref.actor"),
        ("verl.trainr.save_freq=3", "verl.trainer"),
    ],
)
def test_misspelt_options_of_verl_are_refused_with_the_nearest(word: str, near: str) -> None:
    pytest.importorskip("verl")
    with pytest.raises(GradtraceError, match=f"verl has no such option. Did you mean '{near}'"):
        translated(word)


@pytest.mark.parametrize(
    "word",
    [
        "verl.ray_kwargs.ray_init.runtime_env.env_vars.X=1",
        "verl.actor_rollout_ref.rollout.engine_kwargs.vllm.anything=1",
        "verl.actor_rollout_ref.model.override_config.rope_theta=3",
        "verl.trainer.save_freq=3",
    ],
)
def test_options_that_verl_has_room_for_pass(word: str) -> None:
    translated(word)


def test_verls_own_variable_for_the_time_out_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradtrace.integrations.verl.rank import process_group

    monkeypatch.setenv("VERL_PG_TIMEOUT_SECONDS", "77")
    assert process_group.timeout_seconds() == 77
    assert translated().environment[process_group.VARIABLE] == "77"
    assert translated("cluster.pg_timeout_seconds=33").environment[process_group.VARIABLE] == "33"
    monkeypatch.setenv(process_group.VARIABLE, "55")
    assert process_group.timeout_seconds() == 55
    monkeypatch.delenv(process_group.VARIABLE)
    monkeypatch.setenv("VERL_PG_TIMEOUT_SECONDS", "soon")
    with pytest.raises(GradtraceError, match="VERL_PG_TIMEOUT_SECONDS=soon"):
        process_group.timeout_seconds()


def test_places_and_names_of_a_tracked_run_reach_verl() -> None:
    words = ("project=mine", "group=seeds", "id=abc")
    found = translated("trainer.trace_dir=/disk", *(f"trainer.wandb.{word}" for word in words))
    assert found.settings["+gradtrace.trace_dir"] == "/disk"
    assert found.settings["trainer.project_name"] == "mine"
    assert found.settings["trainer.experiment_name"] == "mine"  # the run's folder
    names = {"WANDB_RUN_ID": "abc", "WANDB_RESUME": "allow", "WANDB_RUN_GROUP": "seeds"}
    assert names.items() <= found.environment.items()
    assert translated("trainer.wandb.name=n").settings["trainer.experiment_name"] == "n"


@pytest.mark.parametrize("name", ["one_node_8_gpus.sh", "archer_math_8_gpus.sh", "archer_code_8_gpus.sh"])
def test_launch_files_translate(name: str, tmp_path: Path) -> None:
    """What the file gives to gradtrace is a configuration that verl can be told."""
    text = (Path(__file__).parents[3] / "examples" / "launch" / name).read_text()
    words = text.split("gradtrace train", 1)[1].replace("\\\n", " ").replace('"$@"', "").split()
    config = load_config(words)
    settings = translate(config, tmp_path, "model", on_cpu=False).settings
    assert settings["trainer.n_gpus_per_node"] == 8
    assert settings["+gradtrace.influence_trace"]["enable"] and settings["+gradtrace.entropy_trace"]["enable"]
