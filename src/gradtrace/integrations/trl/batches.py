"""TRL's generation batches as ours: the rollout, one slice of it as model inputs, and what its loss divides by.

TRL pads prompts on the left and completions on the right, shuffles the rollout, and deals it out in
`steps_per_generation` slices. A column of row numbers rides along, so that groups are known again afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.policy.microbatch import MicroBatch

ROW = "gradtrace_row"
"""The column we add to TRL's dictionary: row of each completion in the rollout as it was generated."""
LOSS_TYPES = ("grpo", "sapo", "bnpo", "dr_grpo", "luspo", "cispo", "dapo", "vespo")


@dataclass(frozen=True, eq=False)
class LeftPadded(MicroBatch):
    """A slice as TRL gives it to the model."""

    attention_mask: Tensor
    """long[B, S]: 0 at padding on either side."""


def rollout_batch(
    inputs: list[dict[str, Any]],
    output: dict[str, Any],
    rewards: Tensor,
    group_size: int,
    stop_ids: list[int],
) -> RolloutBatch:
    """`inputs`: dataset rows, each `group_size` times in a row. `output`: TRL's rollout of them, not yet shuffled.
    `rewards` float[R] must be finite."""
    mask, present = loss_mask(output).bool().cpu(), output["completion_mask"].bool().cpu()
    ids = output["completion_ids"].cpu()
    lengths = present.sum(1)
    last = ids.gather(1, (lengths - 1).clamp(min=0)[:, None]).squeeze(1)
    first_of_groups = range(0, len(ids), group_size)
    prompts = [
        output["prompt_ids"][row][output["prompt_mask"][row].bool()].tolist() for row in first_of_groups
    ]
    advantages = output["advantages"].cpu().float()
    sampled = output.get("sampling_per_token_logps")
    return RolloutBatch(
        prompts=prompts,
        group=torch.arange(len(ids)) // group_size,
        responses=torch.where(present, ids, 0),
        response_mask=mask,
        lengths=lengths if "tool_mask" in output else None,
        finished=torch.isin(last, torch.tensor(stop_ids)) & (lengths > 0),
        sampler_log_probs=torch.zeros(mask.shape) if sampled is None else sampled.cpu().float(),
        items=[inputs[row] for row in first_of_groups],
        rewards=rewards.cpu().float(),
        advantages=torch.where(mask, advantages[:, None] if advantages.dim() == 1 else advantages, 0.0),
    )


def loss_mask(inputs: dict[str, Tensor]) -> Tensor:
    """[R, C]: the tokens that the policy wrote: not those of tools and environments, which TRL marks."""
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def left_padded(inputs: dict[str, Tensor]) -> LeftPadded:
    """A slice of the shuffled rollout."""
    mask = loss_mask(inputs).bool().cpu()
    input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    tokens = torch.cat([torch.zeros(inputs["prompt_ids"].shape, dtype=torch.bool), mask], dim=1)
    rows = inputs[ROW].cpu()
    return LeftPadded(
        rows=rows,
        input_ids=input_ids,
        position_ids=None,
        packing=None,
        response=rows,
        tokens=tokens,
        logit_positions=tokens.flatten().nonzero().squeeze(-1) - 1,
        mask=mask,
        targets=input_ids[tokens.to(input_ids.device)],
        attention_mask=torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
    )


def token_weights(trainer: Any, inputs: dict[str, Tensor]) -> Tensor:
    """float[b, C]: what TRL's loss multiplies each token of this slice by, gradient accumulation included."""
    mask = loss_mask(inputs).cpu()
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    slices, rows = trainer.current_gradient_accumulation_steps, len(mask)
    loss = trainer.loss_type
    if loss in ("grpo", "sapo"):
        scale = float(slices * rows)
        weights = 1.0 / (scale * lengths)
    else:
        if loss == "bnpo":
            scale = float(slices * max(1, int(mask.sum())))
        elif loss == "dr_grpo":
            scale = float(slices * rows * trainer.max_completion_length)
        elif loss == "luspo":
            scale = float(slices * rows)
        else:  # cispo, dapo, vespo: the tokens of the whole rollout, of which an optimizer step has a part
            tokens = max(1.0, float(inputs["num_items_in_batch"]))
            scale = tokens * slices / trainer.args.steps_per_generation
        weights = torch.full((rows, 1), 1.0 / scale)
    return torch.where(mask.bool(), weights, 0.0)


def is_plain_policy_gradient(trainer: Any) -> bool:
    """Whether, at ratio 1, the gradient of TRL's loss is −A ∇ℓ for every token, before it is averaged."""
    # TRL's CISPO bounds the ratio itself by epsilon_high, not 1 + epsilon_high: by its default, 0.2, every token's.
    bounded = trainer.loss_type == "cispo" and trainer.epsilon_high < 1.0
    corrected = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    masked = trainer.top_entropy_quantile < 1.0 or trainer.off_policy_mask_threshold is not None
    return not (bounded or corrected or masked or trainer.aux_loss_enabled)
