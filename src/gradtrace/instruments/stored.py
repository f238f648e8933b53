"""Rollouts that a run has stored, back as a `RolloutBatch`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.instruments.columns import Truth
from gradtrace.trace.step import Step


def stored_batch(step: Step) -> RolloutBatch:
    """The responses of a step's file in their order, with the sampler's log-probs and advantages where it has them.
    An item of the batch says which group of the file it is."""
    lengths = torch.tensor(step["length"].astype(np.int64))
    present = torch.arange(int(lengths.max()) if len(lengths) else 0) < lengths[:, None]

    def table(column: np.ndarray, dtype: torch.dtype) -> Tensor:
        found = torch.zeros(present.shape, dtype=dtype)
        found[present] = torch.tensor(np.nan_to_num(column)).to(dtype)
        return found

    several = "loss_mask" in step
    mask = table(step["loss_mask"], torch.bool) if several else present

    advantages = None
    if "advantage" in step:
        advantages = torch.where(mask, torch.tensor(step["advantage"])[:, None], 0.0)
    sampled = torch.zeros(mask.shape)
    if "sampler_log_prob" in step:
        sampled = table(step["sampler_log_prob"], torch.float32)
    return RolloutBatch(
        prompts=[step.group(g).prompt_ids.tolist() for g in range(step.n_groups)],
        group=torch.tensor(step["group"].astype(np.int64)),
        responses=table(step["token_id"], torch.long),
        response_mask=mask,
        lengths=lengths,
        segments=[step.segments(r) for r in range(step.n_responses)] if several else None,
        finished=torch.tensor(step["finished"]),
        sampler_log_probs=sampled,
        items=[{"group": g} for g in range(step.n_groups)],
        rewards=torch.tensor(step["reward"]),
        advantages=advantages,
    )


def stored_truth(step: Step) -> Truth:
    """What the file says about right answers, for `stored_batch` of the same file."""
    expected = [step.group(g).expected_ids for g in range(step.n_groups)]
    wrong = {}
    if "first_wrong" in step:
        for r, (group, place) in enumerate(zip(step["group"], step["first_wrong"], strict=True)):
            wrong[int(group), tuple(step.tokens(r)["token_id"].tolist())] = int(place)

    def truth(item: dict[str, Any], response: list[int]) -> tuple[list[int] | None, int | None]:
        answer = expected[item["group"]]
        known = answer.tolist() if answer is not None and len(answer) else None
        return known, wrong.get((item["group"], tuple(response)))

    return truth
