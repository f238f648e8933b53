"""The update after a selection: kept responses only, in mini-batches and on ranks, for a verl that cuts equal parts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size

from gradtrace.batch import RolloutBatch

RESPONSE_FIELDS = (
    *("advantages", "returns", "old_log_probs", "entropy", "ref_log_prob", "values"),
    *("token_level_rewards", "rollout_is_weights"),
)
"""Fields with one number for each response token, which verl's padding copies from another response."""
PADDING = -1


@dataclass(frozen=True)
class SelectionPlan:
    order: list[int]
    """Rows of the batch, or PADDING, in the order in which verl cuts them: rank by rank, and each rank's part
    mini-batch by mini-batch."""
    mini_batch: Tensor
    """long[R]: the optimizer step that a row belongs to; −1 if it was dropped."""
    size: int
    """Responses and padding of a mini-batch, on all ranks."""


def plan_selection(
    group: Tensor,
    kept: Tensor,
    groups_per_step: int,
    ranks: int,
    multiple: int = 1,
    seed: int | None = None,
) -> SelectionPlan:
    """As the embedded loop does it: `groups_per_step` groups with a kept response make an optimizer step, in order or,
    with a `seed`, at random. Every rank gets about equally many of its responses, siblings together where it goes; all
    are filled up to one size, a multiple of `multiple` on each rank."""
    groups = group[kept].unique().tolist()
    if seed is not None:
        random.Random(seed).shuffle(groups)
    mini_batch = torch.full((len(group),), -1)
    parts: list[list[list[int]]] = []  # [optimizer step][rank] → rows
    for begin in range(0, len(groups), groups_per_step):
        chosen = groups[begin : begin + groups_per_step]
        rows = [row for number in chosen for row in (kept & (group == number)).nonzero().squeeze(-1).tolist()]
        mini_batch[rows] = len(parts)
        parts.append(cut(rows, ranks))
    longest = max(len(part) for step in parts for part in step)
    size = -(-longest // multiple) * multiple
    order = []
    for rank in range(ranks):
        for step in parts:
            order += [*step[rank], *[PADDING] * (size - len(step[rank]))]
    return SelectionPlan(order, mini_batch, size * ranks)


def cut(rows: Sequence[int], ranks: int) -> list[list[int]]:
    """Into `ranks` pieces that differ by one at most."""
    borders = [rank * len(rows) // ranks for rank in range(ranks + 1)]
    return [list(rows[begin:end]) for begin, end in pairwise(borders)]


def selected_batch(
    batch: Any, row_keys: list[str], plan: SelectionPlan, eos_token_id: int
) -> tuple[Any, list[str]]:
    """The part of `batch` that the plan names, in its order, and the keys of padding that was made for it."""
    tags = dict(zip(batch.keys, batch.tags, strict=True))
    chosen = [row_keys[row] for row in plan.order if row != PADDING]
    found = KVBatchMeta(
        keys=chosen,
        tags=[tags[key] for key in chosen],
        partition_id=batch.partition_id,
        fields=batch.fields,
        extra_info=dict(batch.extra_info),
    )
    found = upsample_batch_to_divisible_size(found, len(plan.order), eos_token_id)
    padding = found.keys[len(chosen) :]
    if padding:
        _fit_padding(padding, batch.partition_id)
    real, filler = iter(range(len(chosen))), iter(range(len(chosen), len(plan.order)))
    found.reorder([next(filler if row == PADDING else real) for row in plan.order])
    return found, padding


def _fit_padding(keys: list[str], partition: str) -> None:
    """Padding has one token without a loss; what was copied from a response has as many numbers as that one has."""
    known = tq.kv_batch_get(keys=keys[:1], partition_id=partition).keys()
    zeros = {name: torch.zeros(len(keys), 1) for name in RESPONSE_FIELDS if name in known}
    tq.kv_batch_put(keys=keys, partition_id=partition, fields=TensorDict(zeros, batch_size=len(keys)))


@contextmanager
def mini_batches_of(config: Any, responses: int) -> Iterator[None]:
    """verl counts a mini-batch as prompts × rollout.n; inside, it has this many responses."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    before = actor.ppo_mini_batch_size, rollout.n
    actor.ppo_mini_batch_size, rollout.n = responses, 1
    try:
        yield
    finally:
        actor.ppo_mini_batch_size, rollout.n = before


def put_advantages(batch: RolloutBatch, row_keys: list[str], partition: str) -> None:
    """Weighted ones (`selection=soft`) in the place of those that verl has computed."""
    assert batch.advantages is not None
    values = [
        row[:length] for row, length in zip(batch.advantages, batch.response_lengths.tolist(), strict=True)
    ]
    nested = torch.nested.as_nested_tensor(values, layout=torch.jagged)
    fields = TensorDict({"advantages": nested}, batch_size=len(values))
    tq.kv_batch_put(keys=row_keys, partition_id=partition, fields=fields)
