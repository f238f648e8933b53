"""verl without a GPU: everything that is needed on CPU only, apart from the adapter.

    VERL_USE_EXTERNAL_MODULES=gradtrace.integrations.verl VERL_PLATFORM=cpu python -m verl.trainer.main_ppo \\
        trainer.device=cpu actor_rollout_ref.rollout.name=gradtrace_cpu …

VERL_PLATFORM=cpu is what loads it; without that a job is left alone.

- `platform`: a verl platform named "cpu" (Ray schedules it as GPUs that `ray.init(num_gpus=N)` merely claims), and
  four places where verl 0.9 assumes an accelerator.
- `rollout`: our sampler as a rollout replica named "gradtrace_cpu"; requests are generated in batches.
- `fork_server`: processes of a job that share their imports; for `gradtrace train`, which starts it.

What else a configuration needs on CPU (sdpa attention, float32, no torch.compile) is in `settings()`; as words for a
command of your own: `python -m gradtrace.integrations.verl.cpu WORKERS`.
"""

import functools

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "RAY_worker_niceness": "0",  # Ray makes its workers nice (15): they are the training itself here
    "RAY_enable_worker_prestart": "0",  # Ray would start one idle process for every CPU that it is told of
}
PLATFORM = "cpu"
ROLLOUT = "gradtrace_cpu"


def settings(workers: int, cpus: int = 16) -> dict[str, object]:
    """verl settings that hold on a CPU, by their path; keys with a + do not exist in verl's own configuration."""
    # Most CPUs have no arithmetic of bf16, which verl computes in by default.
    float32 = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    return {
        "trainer.device": "cpu",
        "actor_rollout_ref.rollout.name": ROLLOUT,
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "actor_rollout_ref.actor.use_torch_compile": False,
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
        "actor_rollout_ref.ref.use_torch_compile": False,
        "actor_rollout_ref.ref.fsdp_config.use_torch_compile": False,
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision": float32,
        "+actor_rollout_ref.ref.fsdp_config.mixed_precision": float32,
        "critic.fsdp.use_torch_compile": False,
        "+critic.fsdp.mixed_precision": float32,
        "+critic.model.override_config.attn_implementation": "sdpa",
        "actor_rollout_ref.rollout.agent.num_workers": 1,
        "actor_rollout_ref.rollout.free_cache_engine": False,
        "reward.num_workers": 1,
        "data.dataloader_num_workers": 0,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "ray_kwargs.ray_init.num_cpus": cpus,
        "+ray_kwargs.ray_init.num_gpus": workers,
        "+ray_kwargs.ray_init.include_dashboard": False,
    }


@functools.cache
def load() -> None:
    """Put it in place, in a process that has verl."""
    from gradtrace.integrations.verl.cpu import platform

    platform.register()  # before anything of verl is imported that asks for the platform
    from gradtrace.integrations.verl.cpu import rollout

    rollout.register()
    platform.adjust()
