"""What would be silently wrong is refused, with the reason and what to do instead."""

from __future__ import annotations

from typing import Any

from gradtrace.config import TracinConfig
from gradtrace.errors import GradtraceError
from gradtrace.instruments.entropy_probe.update_direction import update_rule

NO_CHECKS = (
    "every rank of verl holds shards of the weights and of the optimizer's state, and no step can be tried and taken "
    "back in between; leave it out and run `gradtrace verify RUN` on a checkpoint, which is the same check"
)
NO_SCOPE_PASS = (
    "a rank is given one mini-batch at a time and cannot run the others at the first weights; one mini-batch a step "
    "(actor.mini_batch_size=0) has the same scope"
)
NOT_TRACED = (
    "gradtrace deals the groups of a step to mini-batches and ranks itself, in verl's trainers that share their GPUs "
    "with the rollout. Use trainer.v1.trainer_mode=sync or colocate_async of verl.trainer.main_ppo; or look at this "
    "job's rollouts with trainer.rollout_data_dir and `gradtrace trace import`"
)
OTHER_MAINS = ("fully_async_policy", "one_step_off_policy")
"""Programs of verl whose trainers never ask ours."""


def check_main(words: list[str]) -> None:
    """Refuse `+gradtrace.…` on the command line of a program that would not read it."""
    program = next((name for name in OTHER_MAINS if any(name in word for word in words)), "")
    asked = next((word for word in words if word.lstrip("+").startswith("gradtrace.")), "")
    if program and asked:
        raise GradtraceError(f"{asked}: verl.experimental.{program} does not trace. {NOT_TRACED}.")


def check_asynchronous(options: Any) -> None:
    """What a step samples by itself would wait behind rollouts that go on, and be of other weights than its own."""
    for name, wanted in (
        ("tracin", options.tracin.enable),
        ("entropy_probe", options.entropy_probe.every > 0),
    ):
        if wanted:
            raise GradtraceError(
                f"gradtrace.{name} samples at the weights of the step, which trainer.v1.trainer_mode=colocate_async "
                "does not wait for. Use trainer_mode=sync, or leave it out: traces and blame work."
            )


def check_engine(engine: Any) -> None:
    """Wrong with or without a trace."""
    attention = getattr(engine.model_config.hf_config, "_attn_implementation", "")
    if engine.engine_config.ulysses_sequence_parallel_size > 1 and attention == "sdpa":
        raise GradtraceError(
            "ulysses_sequence_parallel_size > 1 with attn_implementation=sdpa: verl 0.9 then computes a wrong loss "
            "without any error (sdpa is not one of the attentions it rewrites). Use flash_attention_2, or size 1."
        )


def check_hooks(engine: Any, section: str, more: dict[str, bool] | None = None) -> None:
    """Right in verl, but not what hooks in its backward pass can read. `section`: of ours, that needs them; `more`:
    further problems, and whether they are there."""
    settings = engine.engine_config
    problems = {
        "actor.strategy=fsdp (FSDP1) flattens parameters, so that layers cannot be told apart; use fsdp2": (
            settings.strategy != "fsdp2"
        ),
        "actor.ulysses_sequence_parallel_size > 1 splits a response's tokens over ranks; use 1": (
            settings.ulysses_sequence_parallel_size > 1
        ),
        "mixed_precision.param_dtype=fp16 scales the loss by a factor that changes; use bf16 or fp32": (
            engine.scaler is not None
        ),
        "actor.qat.enable trains on quantised weights, whose gradients are estimates": engine._qat_enabled,
    }
    for problem, found in {**problems, **(more or {})}.items():
        if found:
            raise GradtraceError(f"gradtrace.{section}: {problem}.")


def check_selection_settings(settings: TracinConfig, responses: int) -> None:
    """`responses`: to each training prompt."""
    settings.validate_with(responses, "gradtrace.tracin.")
    if settings.method == "tangent":
        raise GradtraceError(
            "tracin.method=tangent cannot run on verl: forward mode does not go through FSDP's sharded weights. Use "
            "auto or ghost; the scores are the same."
        )
    if settings.train_on_validation:
        raise GradtraceError(
            "tracin.train_on_validation=true cannot run on verl: its training batch is what its own sampler dealt "
            "to the ranks, and validation rollouts are outside of it. Use false, and put those prompts into "
            "data.train_files as well, with rewards that you trust."
        )
    if settings.parameters != "linear":
        raise GradtraceError(
            f"tracin.parameters={settings.parameters} cannot run on verl: scores come from hooks on linear layers "
            "there. Use linear (biases and tied embeddings included)."
        )


def check_probe(engine: Any) -> None:
    """Refuse what is too coarse to see the change of one update, and optimizers whose update is not known."""
    check_differences(engine, "entropy_probe")
    update_rule(engine.optimizer)


def check_differences(engine: Any, section: str) -> None:
    """Refuse what is wrong with hooks, and what is too coarse for small steps along a direction."""
    check_hooks(engine, section)
    without = " Or score without loss terms: credit=tail." if section == "influence_trace" else ""
    if engine.engine_config.use_fused_kernels:
        raise GradtraceError(
            f"gradtrace.{section}: use_fused_kernels=true computes log-probs in half precision; use false.{without}"
        )
    coarse = {str(p.dtype) for p in engine.module.parameters() if p.requires_grad} - {"torch.float32"}
    if coarse:
        raise GradtraceError(
            f"gradtrace.{section}: parameters are stored as {', '.join(coarse)}, whose rounding is larger than the "
            "changes of an update. Use actor.fsdp_config.model_dtype=fp32 (computing in bf16 stays possible: "
            f"fsdp_config.mixed_precision.param_dtype=bf16).{without}"
        )
