"""From verl's TransferQueue to a `RolloutBatch`."""

from __future__ import annotations

import json
from typing import Any

import torch
import transfer_queue as tq
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.errors import GradtraceError

FIELDS = ["prompts", "responses", "response_mask", "rm_scores", "advantages", "old_log_probs", "entropy"]


def group_of_key(key: str) -> str:
    """Keys are UID_SESSION_INDEX."""
    return key.rsplit("_", 2)[0]


def read_batch(
    keys: list[str], partition: str, response_length: int, stop_token_ids: tuple[int, ...]
) -> RolloutBatch:
    """The responses `keys` in that order; groups are numbered as they come."""
    found = tq.kv_batch_get(keys=keys, partition_id=partition, select_fields=[*FIELDS, "extra_info"])
    missing = [name for name in FIELDS if found.get(name, None) is None]
    if missing:
        raise GradtraceError(
            f"the trace needs {', '.join(missing)}, which this verl job does not compute "
            "(algorithm.rollout_correction.bypass_mode=true leaves out entropies and log-probs)"
        )
    if not bool(found["response_mask"].values().bool().all()):
        raise GradtraceError(
            "responses with several turns (a response mask with holes) are not traced yet: use a single-turn agent "
            "loop, or turn gradtrace's traces off"
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
    mask = torch.arange(int(lengths.max())) < lengths[:, None]

    def dense(name: str) -> Tensor:
        return found[name].to_padded_tensor(0.0).float()[:, : mask.shape[1]]

    responses = found["responses"].to_padded_tensor(0)
    last = responses.gather(1, (lengths - 1).clamp(min=0)[:, None]).squeeze(1)
    finished = torch.isin(last, torch.tensor(stop_token_ids)) | (lengths < response_length)
    return RolloutBatch(
        prompts=prompts,
        group=group,
        responses=responses,
        response_mask=mask,
        finished=finished,
        sampler_log_probs=dense("old_log_probs"),
        items=items,
        rewards=dense("rm_scores").sum(1),
        old_log_probs=dense("old_log_probs"),
        entropies=dense("entropy"),
        advantages=dense("advantages"),
    )


def item_of(extra_info: Any) -> dict[str, Any]:
    """The task's item, where the launcher put one into the data."""
    extra_info = getattr(extra_info, "data", extra_info)
    text = extra_info.get("gradtrace_item") if isinstance(extra_info, dict) else None
    return json.loads(text) if text else {}
