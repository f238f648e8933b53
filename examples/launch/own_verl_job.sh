#!/usr/bin/env bash
# A verl job of your own with gradtrace's traces: one environment variable, and the last three lines of the command.
#   MODEL=Qwen/Qwen2.5-0.5B-Instruct DATA=~/data/gsm8k bash examples/launch/own_verl_job.sh
# Words behind it are added to the command. On a machine without a GPU:
#   VERL_PLATFORM=cpu MODEL=… DATA=… bash examples/launch/own_verl_job.sh $(python -m gradtrace.integrations.verl.cpu 2)
set -euo pipefail
export VERL_USE_EXTERNAL_MODULES=gradtrace.integrations.verl   # on all nodes
python -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
    data.train_batch_size=4 data.max_prompt_length=256 data.max_response_length=32 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.ppo_mini_batch_size=2 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    trainer.nnodes=1 trainer.n_gpus_per_node=2 trainer.total_training_steps=2 trainer.logger=[console] \
    +gradtrace.run_dir=runs/mine \
    +gradtrace.entropy_trace.enable=true \
    +gradtrace.influence_trace.enable=true \
    "$@"
