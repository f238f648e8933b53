"""TRL's generation batches as ours: the rollout, one slice of it as model inputs, and what its loss divides by.

TRL pads prompts on the left and completions on the right, shuffles the rollout, and deals it out in
`steps_per_generation` slices. A column of row numbers rides along, so that groups are known again afterwards. On
several processes each has a part of the rollout, and a group may lie on two of them; rows are numbered through all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradtrace.attribution.collectives import Ranks
from gradtrace.batch import RolloutBatch
from gradtrace.policy.microbatch import MicroBatch

ROW = "gradtrace_row"
"""The column we add to TRL's dictionary: row of each completion in the rollout as it was generated."""
COLUMNS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages")
LOG_PROBS = ("sampling_per_token_logps", "old_per_token_logps")
"""Columns that some rollouts have."""
ENTROPIES = "gradtrace_entropies"
"""The column we add for a rollout whose log-probs TRL took when it was generated: entropies of the same pass."""


@dataclass(frozen=True, eq=False)
class LeftPadded(MicroBatch):
    """A slice as TRL gives it to the model."""

    attention_mask: Tensor
    """long[B, S]: 0 at padding on either side."""


def whole_rollout(
    ranks: Ranks, inputs: list[dict[str, Any]], output: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Dataset rows and columns of all ranks, rank after rank, on the CPU, from those that TRL gave to this one."""
    own = {name: output[name].cpu() for name in (*COLUMNS, *LOG_PROBS, ENTROPIES) if name in output}
    parts = ranks.gather((inputs, own))
    columns = {}
    for name in own:
        tensors = [columns_of_rank[name] for _, columns_of_rank in parts]
        if tensors[0].dim() == 2:
            width = max(tensor.shape[1] for tensor in tensors)
            left = name.startswith("prompt")
            tensors = [
                pad(tensor, (width - tensor.shape[1], 0) if left else (0, width - tensor.shape[1]))
                for tensor in tensors
            ]
        columns[name] = torch.cat(tensors)
    return [row for rows, _ in parts for row in rows], columns


def rollout_batch(
    inputs: list[dict[str, Any]],
    output: dict[str, Any],
    rewards: Tensor,
    group_size: int,
    stop_ids: list[int],
) -> RolloutBatch:
    """`inputs`: dataset rows, each `group_size` times in a row. `output`: `whole_rollout` of them, not yet shuffled.
    `rewards` float[R] must be finite."""
    mask, present = loss_mask(output).bool(), output["completion_mask"].bool()
    ids = output["completion_ids"]
    lengths = present.sum(1)
    last = ids.gather(1, (lengths - 1).clamp(min=0)[:, None]).squeeze(1)
    first_of_groups = range(0, len(ids), group_size)
    prompts = [output["prompt_ids"][row][output["prompt_mask"][row].bool()].tolist() for row in first_of_groups]
    advantages = output["advantages"].float()
    sampled, old, entropies = (output.get(name) for name in (*LOG_PROBS, ENTROPIES))
    unknown = torch.zeros(mask.shape)
    if sampled is not None and bool(sampled.isnan().any()):
        # vLLM did not say what these were; TRL takes them as the trainer's.
        sampled = None if old is None else torch.where(sampled.isnan(), old, sampled)
    return RolloutBatch(
        prompts=prompts,
        group=torch.arange(len(ids)) // group_size,
        responses=torch.where(present, ids, 0),
        response_mask=mask,
        lengths=lengths if "tool_mask" in output else None,
        finished=torch.isin(last, torch.tensor(stop_ids)) & (lengths > 0),
        sampler_log_probs=unknown if sampled is None else torch.where(mask, sampled.float(), 0),
        old_log_probs=unknown if old is None else torch.where(mask, old.float(), 0),
        entropies=unknown if entropies is None else torch.where(mask, entropies.float(), 0),
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
