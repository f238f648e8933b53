"""What is true of TRL's loss: its weights of tokens, which of its terms are plain, and how it clips a ratio."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradtrace.algorithms import LossInputs, LossOutputs, policy_loss
from gradtrace.attribution import TrainingPass
from gradtrace.integrations.trl.batches import loss_mask

LOSS_TYPES = ("grpo", "sapo", "bnpo", "dr_grpo", "luspo", "cispo", "dapo", "vespo")
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Those that take the smaller of the ratio's and the clipped ratio's term."""
AGGREGATION = {"grpo": "sequence_mean", "sapo": "sequence_mean", "dr_grpo": "fixed_length"}
"""How loss types weigh the tokens of a batch; the others count every token alike."""


def token_weights(trainer: Any, inputs: dict[str, Tensor]) -> Tensor:
    """float[b, C]: what TRL's loss multiplies each token of this slice by, gradient accumulation included. Of several
    ranks' gradients the optimizer is then given the mean."""
    mask = loss_mask(inputs).cpu()
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    slices, rows = trainer.current_gradient_accumulation_steps, len(mask)
    loss = trainer.loss_type
    scale = float(slices * rows)  # grpo, sapo, luspo
    if loss == "bnpo":
        scale = float(slices * max(1, int(mask.sum())))
    elif loss == "dr_grpo":
        scale *= trainer.max_completion_length
    elif loss in ("cispo", "dapo", "vespo"):  # the tokens of the whole rollout: an optimizer step has a part of them
        tokens = max(1.0, float(inputs["num_items_in_batch"]))
        scale = tokens * slices / trainer.args.steps_per_generation / trainer.accelerator.num_processes
    weights = 1.0 / (scale * lengths) if loss in ("grpo", "sapo") else torch.full((rows, 1), 1.0 / scale)
    return torch.where(mask.bool(), weights, 0.0)


def training_pass(trainer: Any) -> TrainingPass:
    """What is true of every backward pass of TRL's loss."""
    # TRL's CISPO bounds the ratio itself by epsilon_high, not 1 + epsilon_high: by its default, 0.2, every token's.
    bounded = trainer.loss_type == "cispo" and trainer.epsilon_high < 1.0
    corrected = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    masked = trainer.top_entropy_quantile < 1.0 or trainer.off_policy_mask_threshold is not None
    return TrainingPass(
        # At ratio 1 the gradient is −A ∇ℓ for every token, before it is averaged.
        policy_gradient_at_ratio_one=not (bounded or corrected or masked or trainer.aux_loss_enabled),
        kl_in_loss=trainer.beta != 0.0,
        entropy_bonus=trainer._entropy_bonus_enabled,
    )


def clipped_loss(trainer: Any) -> Callable[[LossInputs], LossOutputs] | None:
    """TRL's loss of a ratio to any old log-probs, without KL and entropy terms; None where it does not clip every
    token's own ratio."""
    if trainer.loss_type not in CLIPPED or trainer.importance_sampling_level != "token":
        return None
    low, high = trainer.epsilon_low, trainer.epsilon_high
    return policy_loss("ppo", clip_low=low, clip_high=high, dual_clip=trainer.args.delta)
