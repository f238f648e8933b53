"""TRL's generation batches as ours: the rollout, one slice of it as model inputs, and what its loss divides by.

TRL pads prompts on the left and completions on the right, shuffles the rollout, and deals it out in
`steps_per_generation` slices. A column of row numbers rides along, so that groups are known again afterwards. On
several processes each has a part of the rollout, and a group may lie on two of them; rows are numbered through all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradtrace.attribution.collectives import Ranks
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.contract import OptimizerStep
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

    def only(self, rows: Tensor) -> LeftPadded:
        """The same inputs, in which only these rows of the batch count; the others only fill up."""
        chosen = torch.isin(self.rows, rows)
        if bool((chosen | ~self.mask.any(1)).all()):
            return self
        rows, tokens = torch.where(chosen, self.rows, -1), self.tokens & chosen[:, None]
        return LeftPadded.of(rows, self.input_ids, self.attention_mask, tokens, self.mask & chosen[:, None])

    @staticmethod
    def of(rows: Tensor, input_ids: Tensor, attention_mask: Tensor, tokens: Tensor, mask: Tensor) -> LeftPadded:
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
            attention_mask=attention_mask,
        )


@dataclass(eq=False)
class Rollout:
    """One rollout, from its generation to the last slice of its first pass. The columns fill up slice by slice."""

    batch: RolloutBatch
    """In the order of generation, as it was known before the first pass."""
    update: OptimizerStep
    """All that is trained on of it, as one: TRL deals groups out over slices and optimizer steps."""
    began_at: int
    """TRL's global step when it was generated."""
    rows: Tensor
    """long[r]: the completions that this process trains on."""
    slices_left: int
    has_statistics: bool
    """TRL took log-probs (and we entropies) of the sampling weights when it generated."""
    is_scored: bool = False
    """Observers have seen its gradient."""
    statistics: dict[str, Tensor] = field(init=False)
    """float[R, C] each: old_log_probs and entropies."""
    token_weight: Tensor = field(init=False)
    """float[R]: what the loss multiplied each completion's tokens by."""
    log_prob_weight: Tensor = field(init=False)
    """float[R, C]: derivative of TRL's loss by each token's log-prob, as its backward pass had it."""
    entropy_weight: Tensor = field(init=False)
    """float[R, C]: the same by each token's entropy (an entropy bonus)."""

    def __post_init__(self) -> None:
        shape = self.batch.response_mask.shape
        known = {name: getattr(self.batch, name) for name in ("old_log_probs", "entropies")}
        self.statistics = {name: torch.zeros(shape) if v is None else v.clone() for name, v in known.items()}
        self.token_weight = torch.ones(shape[0])
        self.log_prob_weight = torch.zeros(shape, dtype=torch.float64)
        self.entropy_weight = torch.zeros(shape, dtype=torch.float64)

    def see_statistics(self, micro: LeftPadded, log_probs: Tensor, entropies: Tensor) -> None:
        """Take log-probs and entropies [b, C] of a slice's forward pass, and listen to its backward pass."""
        if not self.has_statistics:  # then no optimizer step lies between sampling and this pass
            # Those that selection left out are masked here; theirs are known already.
            whole = micro.mask.any(1)
            rows, mask = micro.rows[whole], micro.mask[whole]
            for name, values in (("old_log_probs", log_probs), ("entropies", entropies)):
                own = values.detach().float().cpu()[whole]
                self.statistics[name][rows, : mask.shape[1]] = torch.where(mask, own, 0)
        for values, store in ((log_probs, self.log_prob_weight), (entropies, self.entropy_weight)):
            if values.requires_grad:
                values.register_hook(partial(_take, store, micro.rows))

    def complete(self, ranks: Ranks) -> RolloutBatch:
        """The batch with the statistics of all processes. Collective."""
        if not self.has_statistics:
            own = (self.rows, {name: values[self.rows] for name, values in self.statistics.items()})
            for rows, columns in ranks.gather(own):
                for name, values in columns.items():
                    self.statistics[name][rows] = values
        return self.batch.replace(**self.statistics)

    def terms(self, micro: MicroBatch, log_probs: Tensor, entropies: Tensor) -> Tensor:
        """[b, T]: every token's own term of TRL's loss, before it was averaged. It is linear in the token's log-prob
        and entropy with the derivatives that the backward pass had, which gives the term's gradient for any loss
        type."""
        rows, width, mask = micro.rows, micro.mask.shape[1], micro.mask.to(log_probs.device)
        scale = (1.0 / self.token_weight[rows, None]).to(log_probs)

        def weight(store: Tensor) -> Tensor:
            return torch.where(mask, store[rows, :width].to(log_probs) * scale, 0.0)

        return weight(self.log_prob_weight) * log_probs + weight(self.entropy_weight) * entropies


def _take(store: Tensor, rows: Tensor, gradient: Tensor) -> None:
    store[rows, : gradient.shape[1]] = gradient.detach().to(store)


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
    `rewards` float[R], NaN where nobody has judged: there the mean of the group keeps a completion out of the top."""
    means = rewards.view(-1, group_size).nanmean(1).nan_to_num(0.0).repeat_interleave(group_size)
    rewards = torch.where(rewards.isnan(), means, rewards)
    mask, present = loss_mask(output).bool(), output["completion_mask"].bool()
    ids = output["completion_ids"]
    lengths = present.sum(1)
    last = ids.gather(1, (lengths - 1).clamp(min=0)[:, None]).squeeze(1)
    first_of_groups = range(0, len(ids), group_size)
    prompts = [output["prompt_ids"][row][output["prompt_mask"][row].bool()].tolist() for row in first_of_groups]
    advantages = output["advantages"].float()
    sampled, old, entropies = (output.get(name) for name in (*LOG_PROBS, ENTROPIES))
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
        sampler_log_probs=torch.zeros(mask.shape) if sampled is None else torch.where(mask, sampled.float(), 0),
        old_log_probs=None if old is None else torch.where(mask, old.float(), 0),
        entropies=None if entropies is None else torch.where(mask, entropies.float(), 0),
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
    tokens = torch.cat([torch.zeros(inputs["prompt_ids"].shape, dtype=torch.bool), mask], dim=1)
    ids, attended = (
        torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], dim=1) for name in ("ids", "mask")
    )
    return LeftPadded.of(inputs[ROW].cpu(), ids, attended, tokens, mask)


def masked(output: dict[str, Any], batch: RolloutBatch, rows: Tensor) -> dict[str, Any]:
    """This rank's part `rows` of TRL's rollout with what `kept` and the advantages of the batch say. A completion that
    is left out is masked as TRL itself masks truncated ones: it has no loss, and the loss's normaliser does not count
    its tokens."""
    if batch.kept is None:
        return output
    mask, advantages = output["completion_mask"], output["advantages"]
    kept = batch.kept[rows].to(mask.device)
    advantages_kept = batch.need("advantages")[rows, : mask.shape[1]]
    place = batch.response_mask[rows].int().argmax(1, keepdim=True)
    first = advantages_kept.gather(1, place)[:, 0] if advantages.dim() == 1 else advantages_kept
    return output | {
        "completion_mask": mask * kept[:, None].to(mask.dtype),
        "num_items_in_batch": batch.response_mask[batch.kept].sum().to(mask.device),
        "advantages": torch.where(kept if advantages.dim() == 1 else kept[:, None], first.to(advantages), 0.0),
    }
