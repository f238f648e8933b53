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


def check_engine(engine: Any) -> None:
    """Wrong with or without a trace."""
    attention = getattr(engine.model_config.hf_config, "_attn_implementation", "")
    if engine.engine_config.ulysses_sequence_parallel_size > 1 and attention == "sdpa":
        raise GradtraceError(
            "ulysses_sequence_parallel_size > 1 with attn_implementation=sdpa: verl 0.9 then computes a wrong loss "
            "without any error (sdpa is not one of the attentions it rewrites). Use flash_attention_2, or size 1."
        )


def check_hooks(engine: Any, section: str) -> None:
    """Right in verl, but not what hooks in its backward pass can read. `section`: of ours, that needs them."""
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
    for problem, found in problems.items():
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
    """Refuse what is wrong with hooks, and what is too coarse to see the change of one update."""
    check_hooks(engine, "entropy_probe")
    update_rule(engine.optimizer)
    attention = str(getattr(engine.model_config.hf_config, "_attn_implementation", ""))
    if "flash" in attention:
        raise GradtraceError(half_precision(attention))
    if engine.engine_config.use_fused_kernels:
        raise GradtraceError(
            "gradtrace.entropy_probe: use_fused_kernels=true computes entropies in half precision; use false."
        )
    coarse = {str(p.dtype) for p in engine.module.parameters() if p.requires_grad} - {"torch.float32"}
    if coarse:
        raise GradtraceError(
            f"gradtrace.entropy_probe: parameters are stored as {', '.join(coarse)}, whose rounding is larger than the "
            "entropy changes of an update. Use actor.fsdp_config.model_dtype=fp32."
        )


def half_precision(attention: str) -> str:
    return (
        f"gradtrace.entropy_probe: attn_implementation={attention} computes in half precision, whose rounding is "
        "larger than the entropy changes of an update. Use "
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa."
    )
