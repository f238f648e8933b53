#!/usr/bin/env bash
# Archer on competition math, one machine with 8 GPUs of 80 GB. Before: gradtrace data prepare dapo_math
set -euo pipefail
gradtrace train engine=verl recipe=archer_math trainer.traces=true \
    cluster.num_workers=8 cluster.rollout=vllm cluster.tensor_parallel=1 \
    verl.actor_rollout_ref.rollout.gpu_memory_utilization=0.7 "$@"
