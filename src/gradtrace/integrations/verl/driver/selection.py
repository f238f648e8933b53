"""The update after a selection: kept responses only, in mini-batches and on ranks, for a verl that cuts equal parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size

from gradtrace.batch import RolloutBatch
from gradtrace.integrations.verl.assign import PADDING, SelectionPlan, plan_selection

RESPONSE_FIELDS = (
    *("advantages", "returns", "old_log_probs", "entropy", "ref_log_prob", "values"),
    *("token_level_rewards", "rollout_is_weights"),
)
"""Fields with one number for each response token, which verl's padding copies from another response."""


@dataclass(eq=False)
class Training:
    """The part of a batch that the update is given."""

    batch: Any
    mini_batch: Tensor
    """long[R]: the optimizer step of each row; −1 if it is not trained on."""
    size: int
    """Responses of a mini-batch, with what fills it up."""
    padding: list[str] = field(default_factory=list)
    """Keys of what fills up."""

    @staticmethod
    def of(trainer: Any, rows: RolloutBatch, row_keys: list[str], batch: Any, ranks: int, seed: int | None) -> Training:
        """What of verl's `batch` the rows with `kept` make."""
        actor = trainer.config.actor_rollout_ref.actor
        multiple = 1 if actor.use_dynamic_bsz else int(actor.ppo_micro_batch_size_per_gpu)
        plan = plan_selection(rows.group, rows.need("kept"), actor.ppo_mini_batch_size, ranks, multiple, seed)
        trained, padding = selected_batch(batch, row_keys, plan, trainer.tokenizer.eos_token_id)
        return Training(trained, plan.mini_batch, plan.size, padding)

    def whole_batch(self, batch: Any) -> Any:
        """`batch` again, for metrics and for clearing the queue: with the padding that was made for the update."""
        tags = dict(zip(self.batch.keys, self.batch.tags, strict=True))
        return KVBatchMeta(
            keys=[*batch.keys, *self.padding],
            tags=[*batch.tags, *(tags[key] for key in self.padding)],
            partition_id=batch.partition_id,
            fields=batch.fields,
            extra_info=batch.extra_info,
        )


def selected_batch(batch: Any, row_keys: list[str], plan: SelectionPlan, eos_token_id: int) -> tuple[Any, list[str]]:
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
    values = [
        row[:length] for row, length in zip(batch.need("advantages"), batch.response_lengths.tolist(), strict=True)
    ]
    nested = torch.nested.as_nested_tensor(values, layout=torch.jagged)
    fields = TensorDict({"advantages": nested}, batch_size=len(values))
    tq.kv_batch_put(keys=row_keys, partition_id=partition, fields=fields)
