"""From verl's TransferQueue to a `RolloutBatch`."""

from __future__ import annotations

import json
from typing import Any

import torch
import transfer_queue as tq
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.integrations.verl.tables import CORRECTION, SAMPLED

VALIDATION_FIELDS = ["prompts", "responses", "response_mask", "rm_scores"]
"""Fields of responses that are not trained on."""
FIELDS = ["prompts", "responses", "response_mask", "rm_scores", "advantages", "old_log_probs", "entropy"]


def group_of_key(key: str) -> str:
    """The group of a response, from its key, which is UID_SESSION_INDEX."""
    return key.rsplit("_", 2)[0]


def read_batch(
    keys: list[str],
    partition: str,
    response_length: int,
    stop_token_ids: tuple[int, ...],
    fields: list[str] = FIELDS,
) -> RolloutBatch:
    """The responses `keys` in that order; groups are numbered as they come. Columns that are not among `fields` are
    missing, log-probs zero."""
    found = tq.kv_batch_get(
        keys=keys, partition_id=partition, select_fields=[*fields, SAMPLED, CORRECTION, "extra_info"]
    )
    return batch_of(found, keys, response_length, stop_token_ids, fields)


def batch_of(
    found: Any,
    keys: list[str],
    response_length: int,
    stop_token_ids: tuple[int, ...],
    fields: list[str] = FIELDS,
) -> RolloutBatch:
    """What the queue has `found` of the responses `keys`. verl's response mask is our loss mask: holes in it are what
    tools and templates of an agent loop wrote."""
    missing = [name for name in fields if found.get(name, None) is None]
    if missing:
        raise GradtraceError(
            f"the trace needs {', '.join(missing)}, which this verl job does not compute "
            "(algorithm.rollout_correction.bypass_mode=true leaves out entropies and log-probs)"
        )
    uids = [group_of_key(key) for key in keys]
    group_ids = {uid: number for number, uid in enumerate(dict.fromkeys(uids))}
    group = torch.tensor([group_ids[uid] for uid in uids])
    prompts: list[list[int]] = [[] for _ in group_ids]
    items: list[dict[str, Any]] = [{} for _ in group_ids]
    extra = list(found["extra_info"]) if found.get("extra_info", None) is not None else [None] * len(keys)
    for row, ids in enumerate(found["prompts"].unbind()):
        prompts[group[row]] = ids.tolist()
        items[group[row]] = item_of(extra[row])
    lengths = found["responses"].offsets().diff()
    width = int(lengths.max())
    mask = found["response_mask"].to_padded_tensor(0).bool()[:, :width]

    def dense(name: str) -> Tensor | None:
        if name not in (*fields, SAMPLED, CORRECTION) or found.get(name, None) is None:
            return None
        return found[name].to_padded_tensor(0.0).float()[:, :width]

    responses = found["responses"].to_padded_tensor(0)
    last = responses.gather(1, (lengths - 1).clamp(min=0)[:, None]).squeeze(1)
    finished = torch.isin(last, torch.tensor(stop_token_ids)) | (lengths < response_length)
    rewards, old_log_probs = dense("rm_scores"), dense("old_log_probs")
    sampled = dense(SAMPLED)
    if sampled is None or sampled.shape != mask.shape:  # not asked for, or not of these tokens
        sampled = torch.zeros(mask.shape)
    assert rewards is not None
    return RolloutBatch(
        prompts=prompts,
        group=group,
        responses=responses,
        response_mask=mask,
        lengths=lengths,
        finished=finished,
        sampler_log_probs=sampled,
        items=items,
        rewards=rewards.sum(1),
        old_log_probs=old_log_probs,
        entropies=dense("entropy"),
        advantages=dense("advantages"),
        loss_weights=dense(CORRECTION),
    )


def with_versions(batch: RolloutBatch, tags: list[dict[str, Any]]) -> RolloutBatch:
    """The batch with the weights that each response was sampled with, where the queue's tags say it of all."""
    names = ("min_global_steps", "max_global_steps")
    if any(tag.get(name) is None for tag in tags for name in names):
        return batch
    first, last = (torch.tensor([int(tag[name]) for tag in tags]) for name in names)
    return batch.replace(first_version=first, last_version=last)


def item_of(extra_info: Any) -> dict[str, Any]:
    """The task's item, where the launcher put one into the data."""
    extra_info = getattr(extra_info, "data", extra_info)
    text = extra_info.get("gradtrace_item") if isinstance(extra_info, dict) else None
    return json.loads(text) if text else {}
