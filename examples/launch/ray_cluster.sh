#!/usr/bin/env bash
# A Ray cluster of several machines. First start Ray on each of them, in an environment with gradtrace[verl] and vllm:
#   head:    ray start --head --port=6379
#   others:  ray start --address=HEAD_IP:6379
# Then on the head, with runs/ on storage that every machine sees:
set -euo pipefail
NODES=${NODES:-4}
gradtrace train engine=verl recipe=grpo_gsm8k trainer.traces=true model.device=cuda \
    trainer.runs_dir="${SHARED:?a folder that all machines see}/runs" \
    cluster.ray_address=auto cluster.nodes="$NODES" cluster.num_workers=8 \
    cluster.pg_timeout_seconds=1800 "$@"
