#!/usr/bin/env bash
# One machine with 8 GPUs. Ray is started and ended by the run itself.
set -euo pipefail
gradtrace train engine=verl recipe=grpo_gsm8k trainer.traces=true \
    cluster.num_workers=8 cluster.rollout=vllm cluster.tensor_parallel=1 \
    verl.actor_rollout_ref.rollout.gpu_memory_utilization=0.6 "$@"
