"""PPO with a critic on verl: its own critic and its own estimator, told what ours would do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradtrace.algorithms import advantage
from gradtrace.config.root import Config
from gradtrace.errors import GradtraceError
from gradtrace.policy.settings import OptimConfig

ESTIMATOR = "gae"
"""verl's, which is ours with advantages whitened."""


def check_estimator(config: Config) -> None:
    """Refuse what our estimators need and do not get there: verl hands them rewards and groups alone."""
    name, options = config.algorithm.advantage, config.algorithm.advantage_options
    needs = sorted(advantage(name, **options).needs)
    if name == ESTIMATOR:
        if needs != ["values"]:
            raise GradtraceError(
                "algorithm.advantage_options.kl_coef: verl's KL penalty in rewards has options of its own, "
                "verl.algorithm.use_kl_in_reward=true and verl.algorithm.kl_ctrl.kl_coef; or use algorithm.kl_coef."
            )
        if not options.get("whiten_advantages", True):
            raise GradtraceError(
                "algorithm.advantage_options.whiten_advantages=false: verl always whitens the advantages of gae."
            )
    elif needs:
        raise GradtraceError(
            f"algorithm.advantage={name} needs {', '.join(needs)}, which our estimators do not get on verl; with a "
            "critic there is gae."
        )


def estimator_settings(config: Config) -> dict[str, Any]:
    algorithm = config.algorithm
    if algorithm.advantage != ESTIMATOR:
        return {"algorithm.adv_estimator": f"gradtrace_{algorithm.advantage}"}
    options = algorithm.advantage_options
    return {
        "algorithm.adv_estimator": ESTIMATOR,
        "algorithm.gamma": options.get("gamma", 1.0),
        "algorithm.lam": options.get("lam", 0.95),
    }


def optim_settings(prefix: str, optim: OptimConfig) -> dict[str, Any]:
    """An optimizer of the actor or of the critic."""
    return {
        f"{prefix}.optim.lr": optim.lr,
        f"{prefix}.optim.betas": list(optim.betas),
        f"{prefix}.optim.weight_decay": optim.weight_decay,
        f"{prefix}.optim.lr_warmup_steps": optim.warmup_steps,
        f"{prefix}.optim.lr_scheduler_type": optim.schedule,
        f"{prefix}.optim.min_lr_ratio": optim.min_lr_ratio,
        f"{prefix}.optim.clip_grad": optim.grad_clip or 1e9,
        f"+{prefix}.optim.override_optimizer_config.eps": optim.eps,
    }


def critic_settings(config: Config, run_dir: Path, model: str, mini_batch_size: int, longest: int) -> dict[str, Any]:
    """`longest`: tokens of a micro-batch, as the actor's."""
    if config.algorithm.advantage != ESTIMATOR:
        return {}
    critic = config.critic
    return {
        "critic.strategy": "fsdp2",
        "critic.fsdp.strategy": "fsdp2",
        "critic.model.path": critic.path or model,
        "critic.model.tokenizer_path": str(run_dir / "tokenizer"),
        "critic.model.enable_gradient_checkpointing": config.model.gradient_checkpointing,
        "critic.ppo_mini_batch_size": mini_batch_size,
        "critic.ppo_epochs": critic.epochs,
        "critic.ppo_max_token_len_per_gpu": longest,
        "critic.cliprange_value": critic.value_clip or 1e9,
        "critic.data_loader_seed": config.trainer.seed,
        "trainer.critic_warmup": critic.warmup_steps,
        **optim_settings("critic", critic.optim),
    }
