#!/usr/bin/env bash
# Archer on programs that unit tests judge, one machine with 8 GPUs of 80 GB. Before: gradtrace data prepare mbpp
# Programs run in a sandbox, which needs user namespaces (`gradtrace doctor` says whether they are allowed).
set -euo pipefail
gradtrace train engine=verl recipe=archer_code trainer.traces=true \
    cluster.num_workers=8 cluster.rollout=vllm cluster.tensor_parallel=1 \
    verl.actor_rollout_ref.rollout.gpu_memory_utilization=0.7 "$@"
