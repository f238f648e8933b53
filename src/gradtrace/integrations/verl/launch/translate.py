"""Our configuration → verl's. Every option of ours is mapped, or refused with the reason when it is set."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gradtrace.algorithms import policy_loss
from gradtrace.config.keys import closest, schema_keys
from gradtrace.config.root import Config
from gradtrace.errors import GradtraceError
from gradtrace.instruments.contract import Instrument
from gradtrace.instruments.findings import FindingsConfig
from gradtrace.instruments.registry import enabled, instruments
from gradtrace.instruments.settings import PROMPT_FILES
from gradtrace.instruments.steps import check_needs
from gradtrace.integrations.verl import ALGORITHMS, cpu
from gradtrace.integrations.verl.cannot import ALWAYS
from gradtrace.integrations.verl.launch.critic import (
    check_estimator,
    critic_settings,
    estimator_settings,
    optim_settings,
)
from gradtrace.integrations.verl.launch.data import TEMPLATE
from gradtrace.integrations.verl.rank.process_group import VARIABLE as TIMEOUT_VARIABLE
from gradtrace.integrations.verl.rank.process_group import VERLS as VERLS_TIMEOUT
from gradtrace.training.components import needs_reference

PACKAGE = "gradtrace.integrations.verl"
FREE_IN_VERL = ("gradtrace.", "ray_kwargs.")
"""Sections of its configuration that take keys which it does not list."""
AGGREGATION = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "fixed_length": "seq-mean-token-sum-norm",
}
LAUNCHER = ("recipe", "engine", "resume", "task.", "data.", "reward.", "cluster.", "verl")
"""Set by the launcher itself."""
MAPPED = ("model.", "rollout.", "algorithm.", "actor.", "critic.")
"""Sections that the functions below map whole."""
TRAINER = (
    *("runs_dir", "name", "cpu_threads", "traces", "samples_every"),  # the launcher's, or the terminal's
    *("total_steps", "seed", "logger", "wandb.", "trace_dir", "validation.", "findings."),
    *("checkpoint.every", "checkpoint.keep_last"),
)
"""What is known of the section `trainer`, beside the sections of instruments."""
NOT_NEEDED = {
    "rollout.compile": "a rollout engine compiles its own model",
    "rollout.max_batch_tokens": "bounds the memory of the embedded sampler; a rollout engine bounds its own",
    "trainer.samples_every": "the table in the embedded loop's terminal; the viewer shows responses of either",
}
REFUSED = {
    "rollout.engine": "verl starts its own; see verl.actor_rollout_ref.rollout.name",
    "model.lora.dropout": "verl has no dropout on its FSDP adapters",
    "algorithm.dynamic_sampling.max_batches": "verl's sampler goes on until the batch is full",
    "actor.old_log_probs": "verl recomputes them; for its own bypass see verl.algorithm.rollout_correction.*",
    "rollout.precision": "it emulates on a CPU what rollout engines do; see verl.actor_rollout_ref.rollout.dtype",
    "actor.packing": "choose with verl.actor_rollout_ref.model.use_remove_padding=true|false",
    "actor.share_prompts": "verl's engine has no such layout",
    "actor.optim.schedule_steps": "verl's schedules end with trainer.total_steps",
    "trainer.validation.pass_k": "verl reports mean@n and best@k itself",
    "trainer.validation.success_threshold": "verl reports mean@n and best@k itself",
    "trainer.skip_optimizer": "verl's trainer always makes its step",
    "reference.path": "verl's reference is the starting policy",
    "reward.flip_probability": "label noise is a study of the embedded loop",
}


@dataclass(frozen=True)
class Translation:
    settings: dict[str, Any]
    """verl's keys → values; a + in front where verl's own configuration lacks the key."""
    environment: dict[str, str]
    """Environment variables for the driver and, through Ray, for every worker."""
    not_needed: dict[str, str] = dataclasses.field(default_factory=dict)
    """Settings of ours that have no meaning there, and why."""

    def overrides(self) -> list[str]:
        """The settings as words of verl's command line."""
        return [f"{key}={hydra_value(value)}" for key, value in self.settings.items()]

    def to_yaml(self) -> str:
        return yaml.safe_dump(
            {"environment": self.environment, "verl": self.settings, "not needed": self.not_needed},
            sort_keys=False,
            allow_unicode=True,
        )


def translate(config: Config, run_dir: Path, model: str, on_cpu: bool) -> Translation:
    """`model`: the folder to start from. Data files are those that the launcher writes into `run_dir`."""
    refuse(config)
    workers = config.cluster.num_workers
    check_sizes(config)
    settings: dict[str, Any] = {
        **trainer_settings(config, run_dir),
        **data_settings(config, run_dir),
        **model_settings(config, run_dir, model, on_cpu),
        **actor_settings(config),
        **critic_settings(config, run_dir, model, mini_batch_size(config), longest_micro_batch(config)),
        **rollout_settings(config),
        **algorithm_settings(config),
        **gradtrace_settings(config, run_dir),
    }
    environment = {"VERL_USE_EXTERNAL_MODULES": PACKAGE}
    if config.algorithm.path:
        environment[ALGORITHMS] = config.algorithm.path
    if config.cluster.pg_timeout_seconds:
        environment[TIMEOUT_VARIABLE] = f"{config.cluster.pg_timeout_seconds:g}"
    elif os.environ.get(VERLS_TIMEOUT):  # set on this machine; the workers are to have it too
        environment[TIMEOUT_VARIABLE] = os.environ[VERLS_TIMEOUT]
    tracker = config.trainer.wandb  # wandb reads these where verl's tracker starts it
    environment |= {"WANDB_RUN_ID": tracker.id, "WANDB_RESUME": "allow"} if tracker.id else {}
    environment |= {"WANDB_RUN_GROUP": tracker.group} if tracker.group else {}
    if on_cpu:
        settings = cpu.settings(workers * config.cluster.nodes) | settings
        environment |= cpu.ENVIRONMENT | {"OMP_NUM_THREADS": str(config.trainer.cpu_threads or 1)}
    else:
        settings["actor_rollout_ref.rollout.name"] = config.cluster.rollout
        settings["actor_rollout_ref.rollout.tensor_model_parallel_size"] = config.cluster.tensor_parallel
    if config.cluster.ray_address:
        settings["+ray_kwargs.ray_init.address"] = config.cluster.ray_address
        for claimed in ("ray_kwargs.ray_init.num_cpus", "+ray_kwargs.ray_init.num_gpus"):
            settings.pop(claimed, None)  # an existing cluster has what it has
    for name, value in environment.items():
        settings[f"+ray_kwargs.ray_init.runtime_env.env_vars.{name}"] = value
    default = Config()
    not_needed = {key: why for key, why in NOT_NEEDED.items() if value_at(config, key) != value_at(default, key)}
    return Translation(pass_through(settings, config.verl), environment, not_needed)


# ---------------------------------------------------------------- what cannot be carried over


def refuse(config: Config) -> None:
    default = Config()
    for key in leaves():
        value, usual = value_at(config, key), value_at(default, key)
        reason = REFUSED.get(key, "")
        known = key.startswith((*LAUNCHER, *MAPPED, *(f"trainer.{name}" for name in (*TRAINER, *instrument_keys()))))
        if key == "algorithm.dynamic_sampling.max_batches" and not config.algorithm.dynamic_sampling.enable:
            continue
        if key == "actor.share_prompts" and value == "never":  # as verl does it anyway
            continue
        if value == usual or (known and not reason):
            continue
        raise GradtraceError(
            f"{key}={value} cannot be carried over to engine=verl: {reason or 'it is not known there'}."
        )
    check_estimator(config)
    for one in enabled(config.trainer).values():
        check_needs(one, getattr(config.trainer, one.key), ALWAYS, f"trainer.{one.key}")
    for name in ("actor", "critic"):
        if getattr(config, name).optim.schedule == "linear":
            raise GradtraceError(f"{name}.optim.schedule=linear: verl has constant and cosine only.")


def instrument_keys() -> list[str]:
    """The sections of instruments, with a dot where they have keys."""
    return [f"{one.key}." if isinstance(one.settings, type) else one.key for one in instruments().values()]


def check_sizes(config: Config) -> None:
    """verl cuts batches into equal parts; say so before a cluster has started."""
    workers = config.cluster.num_workers * config.cluster.nodes
    prompts, mini = config.data.train_batch_size, mini_batch_size(config)
    if prompts % mini:
        raise GradtraceError(
            f"data.train_batch_size={prompts} is no multiple of actor.mini_batch_size={mini}: verl would fill the last "
            "mini-batch with padding."
        )
    if mini * config.rollout.n % workers:
        raise GradtraceError(
            f"actor.mini_batch_size={mini} × rollout.n={config.rollout.n} = {mini * config.rollout.n} responses cannot "
            f"be dealt evenly to {workers} workers (cluster.num_workers × cluster.nodes)."
        )


def leaves() -> Iterator[str]:
    keys = list(schema_keys(Config))
    return (key for key in keys if not any(other.startswith(f"{key}.") for other in keys))


def value_at(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


# ---------------------------------------------------------------- section by section


def mini_batch_size(config: Config) -> int:
    return config.actor.mini_batch_size or config.data.train_batch_size


def longest_micro_batch(config: Config) -> int:
    """Tokens; a single response fits in any case."""
    return max(config.actor.token_budget, config.data.max_prompt_length + config.rollout.max_new_tokens)


def trainer_settings(config: Config, run_dir: Path) -> dict[str, Any]:
    trainer = config.trainer
    return {
        "trainer.v1.trainer_mode": "sync",
        "trainer.nnodes": config.cluster.nodes,
        "trainer.n_gpus_per_node": config.cluster.num_workers,
        "trainer.project_name": trainer.wandb.project,
        "trainer.experiment_name": trainer.wandb.name or run_dir.name,
        "trainer.default_local_dir": str(run_dir / "checkpoints"),
        "trainer.resume_mode": "auto",
        "trainer.total_training_steps": trainer.total_steps,
        "trainer.total_epochs": 1_000_000,
        "trainer.save_freq": trainer.checkpoint.every or trainer.total_steps,
        "trainer.max_actor_ckpt_to_keep": trainer.checkpoint.keep_last or None,
        "trainer.test_freq": trainer.validation.every or -1,
        "trainer.val_before_train": bool(trainer.validation.every and trainer.validation.before_training),
        "trainer.logger": ["console", *trainer.logger],
    }


def data_settings(config: Config, run_dir: Path) -> dict[str, Any]:
    return {
        "data.train_files": str(run_dir / "data" / "train.parquet"),
        "data.val_files": str(run_dir / "data" / "validation.parquet"),
        "data.val_max_samples": config.trainer.validation.prompts,  # instruments may have more
        "data.shuffle": False,  # the file has the order of the embedded loop
        "data.seed": config.trainer.seed,
        "data.train_batch_size": config.data.train_batch_size,
        "data.max_prompt_length": config.data.max_prompt_length,
        "data.max_response_length": config.rollout.max_new_tokens,
        "reward.custom_reward_function.path": str(Path(__file__).with_name("data.py")),
        "reward.custom_reward_function.name": "compute_score",
        "+reward.custom_reward_function.reward_kwargs.config": str(run_dir / "config.yaml"),
    }


def model_settings(config: Config, run_dir: Path, model: str, on_cpu: bool) -> dict[str, Any]:
    attention = "sdpa" if on_cpu else "flash_attention_2"
    if config.model.attention != "auto":
        attention = config.model.attention
    settings: dict[str, Any] = {
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.model.tokenizer_path": str(run_dir / "tokenizer"),
        "actor_rollout_ref.model.custom_chat_template": TEMPLATE,
        "actor_rollout_ref.model.enable_gradient_checkpointing": config.model.gradient_checkpointing,
        "+actor_rollout_ref.model.override_config.attn_implementation": attention,
    }
    if config.model.lora.rank:
        targets = config.model.lora.target_modules
        settings |= {
            "actor_rollout_ref.model.lora_rank": config.model.lora.rank,
            "actor_rollout_ref.model.lora_alpha": int(config.model.lora.alpha),
            "actor_rollout_ref.model.target_modules": targets[0] if targets == ["all-linear"] else targets,
            "actor_rollout_ref.model.lora.merge": True,  # any rollout engine can then take the weights
        }
    return settings


def actor_settings(config: Config) -> dict[str, Any]:
    actor, algorithm = config.actor, config.algorithm
    loss = policy_loss(algorithm.policy_loss, **algorithm.policy_loss_options)
    prefix = "actor_rollout_ref.actor"
    settings: dict[str, Any] = {
        f"{prefix}.strategy": "fsdp2",
        f"{prefix}.policy_loss.loss_mode": f"gradtrace_{algorithm.policy_loss}",
        f"{prefix}.calculate_entropy": "entropies" in loss.needs or algorithm.entropy_coef != 0,
        f"{prefix}.loss_agg_mode": AGGREGATION[algorithm.aggregation],
        f"{prefix}.entropy_coeff": algorithm.entropy_coef,
        f"{prefix}.use_kl_loss": needs_reference(config),
        f"{prefix}.kl_loss_coef": algorithm.kl_coef,
        f"{prefix}.kl_loss_type": algorithm.kl_estimator,
        f"{prefix}.ppo_mini_batch_size": mini_batch_size(config),
        f"{prefix}.ppo_epochs": actor.epochs,
        f"{prefix}.shuffle": actor.shuffle,
        f"{prefix}.data_loader_seed": config.trainer.seed,
        f"{prefix}.use_dynamic_bsz": True,
        f"{prefix}.ppo_max_token_len_per_gpu": longest_micro_batch(config),
        **optim_settings(prefix, actor.optim),
    }
    if algorithm.aggregation == "fixed_length":
        settings[f"{prefix}.loss_scale_factor"] = config.rollout.max_new_tokens
    return settings


def rollout_settings(config: Config) -> dict[str, Any]:
    rollout, validation = config.rollout, config.trainer.validation
    prefix = "actor_rollout_ref.rollout"
    turns: dict[str, Any] = {}
    if config.task.name == "calculator":
        turns = {
            f"{prefix}.agent.default_agent_loop": "tool_agent",
            f"{prefix}.multi_turn.enable": True,
            f"{prefix}.multi_turn.max_assistant_turns": rollout.max_turns,
            f"{prefix}.multi_turn.function_tool_path": str(Path(__file__).with_name("calculator_tool.py")),
            f"{prefix}.multi_turn.format": "gradtrace_calculator",
        }
    return {
        **turns,
        f"{prefix}.n": rollout.n,
        f"{prefix}.temperature": rollout.temperature,
        f"{prefix}.top_p": rollout.top_p,
        f"{prefix}.top_k": rollout.top_k or -1,
        f"{prefix}.seed": config.trainer.seed,
        f"{prefix}.tensor_model_parallel_size": 1,
        f"{prefix}.val_kwargs.n": validation.n,
        f"{prefix}.val_kwargs.temperature": validation.temperature,
        f"{prefix}.val_kwargs.top_p": validation.top_p,
        f"{prefix}.val_kwargs.do_sample": validation.temperature > 0,
    }


def algorithm_settings(config: Config) -> dict[str, Any]:
    algorithm = config.algorithm
    settings: dict[str, Any] = {
        **estimator_settings(config),
        "algorithm.use_kl_in_reward": False,
    }
    if algorithm.dynamic_sampling.enable:
        settings |= {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "acc"}
    if algorithm.overlong.enable:
        prefix = "+reward.reward_kwargs"
        settings |= {
            "reward.reward_manager.name": "dapo",
            f"{prefix}.max_resp_len": config.rollout.max_new_tokens,
            f"{prefix}.overlong_buffer_cfg.enable": True,
            f"{prefix}.overlong_buffer_cfg.len": algorithm.overlong.buffer,
            f"{prefix}.overlong_buffer_cfg.penalty_factor": algorithm.overlong.penalty,
            f"{prefix}.overlong_buffer_cfg.log": False,
        }
    return settings


def gradtrace_settings(config: Config, run_dir: Path) -> dict[str, Any]:
    """Our own section of verl's configuration: what is not at its default."""
    trace_dir = config.trainer.trace_dir
    wanted: dict[str, Any] = {
        "run_dir": str(run_dir),
        "trace_dir": trace_dir and str(Path(trace_dir).expanduser().absolute()),
        "metrics": True,
        "task": config.task.name,
        "policy_loss_options": dict(config.algorithm.policy_loss_options),
        "advantage_options": dict(config.algorithm.advantage_options),
    }
    wanted["findings"] = changed(config.trainer.findings, FindingsConfig())
    for one in instruments().values():
        wanted[one.key] = changed(getattr(config.trainer, one.key), one.default())
        for name in prompt_files(config, one):
            wanted[one.key][name] = [str(run_dir / held_out_file(one))]
    return {f"+gradtrace.{name}": value for name, value in wanted.items() if value not in ({}, "")}


def changed(section: Any, default: Any) -> Any:
    """What is not at its default in a section; a number as it is."""
    if not dataclasses.is_dataclass(section):
        return section
    values, usual = (dataclasses.asdict(of) for of in (section, default))  # type: ignore[arg-type]
    return {key: value for key, value in values.items() if value != usual[key]}


def prompt_files(config: Config, one: Instrument) -> list[str]:
    """Settings of an instrument that is on which name files with prompts: verl reads those from the run's folder."""
    section = getattr(config.trainer, one.key)
    if one.name not in enabled(config.trainer) or not dataclasses.is_dataclass(section):
        return []
    return [field.name for field in dataclasses.fields(section) if field.metadata.get(PROMPT_FILES)]


def held_out_file(one: Instrument) -> str:
    """Where in the run the prompts of an instrument are that is given prompts of its own."""
    return f"data/{one.key}_validation.parquet"


def pass_through(settings: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The user's `verl.…=` on top: they win."""
    merged = dict(settings)
    for key, value in flat(own):
        check_option(key)
        for known in (key, f"+{key}"):
            if known in merged:
                merged[known] = value
                break
        else:
            merged[f"++{key}"] = value
    return merged


def check_option(key: str) -> None:
    """An option that verl's own configuration has, or has room for: it would take any other in silence."""
    if (node := verls_options()) is None or key.startswith(FREE_IN_VERL):
        return
    path = ""
    for name in key.split("."):
        if not isinstance(node, dict) or not node or path.endswith("kwargs"):
            return  # a section without keys of its own takes any
        if name not in node:
            near = ".".join(filter(None, ["verl", path, closest(name, list(node))]))
            raise GradtraceError(f"verl.{key}: verl has no such option. Did you mean '{near}'?")
        node, path = node[name], f"{path}.{name}".lstrip(".")


@functools.lru_cache
def verls_options() -> dict[str, Any] | None:
    """verl's configuration with all its defaults, as its package has it; None where it is not installed."""
    found = importlib.util.find_spec("verl")
    if found is None or found.origin is None:
        return None
    file = Path(found.origin).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml"
    return yaml.safe_load(file.read_text()) if file.is_file() else None


def flat(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def hydra_value(value: Any) -> str:
    """A value written so that Hydra's command line reads it back."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{hydra_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(hydra_value(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)
