"""What a verl job does not offer to instruments, and why: the ends of error messages, and what is wrong with or without
a trace."""

from __future__ import annotations

from typing import Any

from gradtrace.errors import GradtraceError

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
NOT_ASYNCHRONOUS = (
    "it samples at the weights of the step, which trainer.v1.trainer_mode=colocate_async does not wait for. Use "
    "trainer_mode=sync, or leave it out: traces and blame work"
)
ALWAYS = {
    "scope_pass": NO_SCOPE_PASS,
    "trials": NO_CHECKS,
    "forward_mode": (
        "forward mode does not go through FSDP's sharded weights. Use auto or ghost; the scores are the same"
    ),
    "every_parameter": (
        "scores come from hooks on linear layers on verl. Use linear (biases and tied embeddings included)"
    ),
    "more_rollouts": (
        "verl's training batch is what its own sampler dealt to the ranks, and validation rollouts are outside of it. "
        "Use false, and put those prompts into data.train_files as well, with rewards that you trust"
    ),
}
"""Of every job, so that the launcher can say it before anything starts."""
OTHER_MAINS = ("fully_async_policy", "one_step_off_policy")
"""Programs of verl whose trainers never ask ours."""
SINGLE_TURN = "single_turn_agent"


def check_main(words: list[str]) -> None:
    """Refuse `+gradtrace.…` on the command line of a program that would not read it."""
    program = next((name for name in OTHER_MAINS if any(name in word for word in words)), "")
    asked = next((word for word in words if word.lstrip("+").startswith("gradtrace.")), "")
    if program and asked:
        raise GradtraceError(f"{asked}: verl.experimental.{program} does not trace. {NOT_TRACED}.")


def check_engine(engine: Any) -> None:
    """Wrong with or without a trace."""
    attention = getattr(engine.model_config.hf_config, "_attn_implementation", "")
    if engine.engine_config.ulysses_sequence_parallel_size > 1 and attention == "sdpa":
        raise GradtraceError(
            "ulysses_sequence_parallel_size > 1 with attn_implementation=sdpa: verl 0.9 then computes a wrong loss "
            "without any error (sdpa is not one of the attentions it rewrites). Use flash_attention_2, or size 1."
        )


def job_cannot(config: Any, knows_token_terms: bool, asynchronous: bool = False) -> dict[str, str]:
    """What is known of a job from verl's whole configuration, before any worker starts."""
    actor, found = config.actor_rollout_ref.actor, dict(ALWAYS)
    if actor.strategy != "fsdp2":
        strategy = f"it needs actor.strategy=fsdp2, not {actor.strategy}: the hooks are in verl's FSDP2 engine"
        needs = ("hooks", "derivative", "next_gradient", "policy_terms", "terms", "token_terms")
        found |= dict.fromkeys(needs, strategy)
    elif not knows_token_terms:
        mode = actor.policy_loss.get("loss_mode", "vanilla")
        unknown = (
            f"the token terms of actor.policy_loss.loss_mode={mode} are not known; use vanilla or one of gradtrace's "
            "losses"
        )
        found |= dict.fromkeys(("terms", "token_terms", "policy_terms"), unknown)
    agent = config.actor_rollout_ref.rollout.agent.default_agent_loop
    if agent != SINGLE_TURN:
        found["fresh_samples"] = (
            f"rollout.agent.default_agent_loop={agent}, and its own responses are sampled in one turn: only "
            f"{SINGLE_TURN} works. Leave it out; the traces work with other agent loops"
        )
    if asynchronous:
        found |= dict.fromkeys(("samples", "fresh_samples"), NOT_ASYNCHRONOUS)
    return found


def engine_cannot(engine: Any) -> dict[str, str]:
    """What hooks in this engine's backward pass cannot read, and what is too coarse for small steps along a
    direction."""
    settings, found = engine.engine_config, dict(ALWAYS)
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
    if why := next((problem for problem, is_so in problems.items() if is_so), ""):
        found |= {"hooks": why, "derivative": why}
    coarse = {str(p.dtype) for p in engine.module.parameters() if p.requires_grad} - {"torch.float32"}
    if coarse:
        found.setdefault(
            "derivative",
            f"parameters are stored as {', '.join(coarse)}, whose rounding is larger than the changes of an update. "
            "Use actor.fsdp_config.model_dtype=fp32 (computing in bf16 stays possible: "
            "fsdp_config.mixed_precision.param_dtype=bf16)",
        )
    if settings.use_fused_kernels:
        found.setdefault("derivative", "use_fused_kernels=true computes log-probs in half precision; use false")
        found["output_layer"] = "use_fused_kernels=true hides the output layer from the hooks; use false"
    if hasattr(engine.model_config.hf_config, "vision_config"):
        found["output_layer"] = "a model that sees images is not supported"
    return found
