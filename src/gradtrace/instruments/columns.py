"""From a `RolloutBatch` to the columns that every trace of it has in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradtrace.algorithms import accepted
from gradtrace.batch import RolloutBatch
from gradtrace.trace.columns import SegmentRole, offsets_of, ragged

Truth = Callable[[dict[str, Any], list[int]], tuple[list[int] | None, int | None]]
"""(task item, response ids) → (ids of the right answer, index of the first wrong token), None where unknown."""


def no_truth(item: dict[str, Any], response: list[int]) -> tuple[None, None]:
    """The truth of a task that knows right answers only by their reward: nothing."""
    return None, None


def group_columns(batch: RolloutBatch, truth: Truth = no_truth) -> dict[str, Any]:
    """All G groups: ids, prompts and, where the task knows them, right answers."""
    prompt_ids, prompt_offsets = ragged(batch.prompts)
    columns: dict[str, Any] = {
        "group_id": np.arange(len(batch.prompts)),
        "prompt_ids": prompt_ids,
        "prompt_offsets": prompt_offsets,
    }
    expected = [truth(item, [])[0] for item in batch.items]
    if any(answer is not None for answer in expected):
        columns["expected_ids"], columns["expected_offsets"] = ragged([answer or [] for answer in expected])
    return columns


def response_columns(batch: RolloutBatch, rows: Tensor, truth: Truth = no_truth) -> dict[str, Any]:
    """The responses `rows`, token ids included, in that order."""
    chosen, rewards = batch.select(rows), batch.need("rewards")
    ids = chosen.response_ids
    columns: dict[str, Any] = {
        "group": chosen.group.numpy(),
        "row": rows.numpy(),
        "reward": rewards[rows].numpy(),
        "accepted": accepted(rewards, batch.group)[rows].numpy(),
        "length": np.array([len(response) for response in ids]),
        "finished": chosen.finished.numpy(),
        "token_id": chosen.responses[chosen.present].numpy(),
        **turn_columns(chosen),
    }
    if chosen.first_version is not None and chosen.last_version is not None:
        columns["policy_version"] = chosen.first_version.numpy()
        columns["last_policy_version"] = chosen.last_version.numpy()
    if batch.advantages is not None:
        columns["advantage"] = response_advantages(batch)[rows].numpy()
    if batch.items:
        groups = chosen.group.tolist()
        wrong = [truth(batch.items[group], response)[1] for group, response in zip(groups, ids, strict=True)]
        if any(index is not None for index in wrong):
            columns["first_wrong"] = np.array([-1 if index is None else index for index in wrong])
    return columns


def response_advantages(batch: RolloutBatch) -> Tensor:
    """float[R]: the mean advantage of the tokens that the policy wrote (in GRPO they are all equal)."""
    total = torch.where(batch.response_mask, batch.need("advantages"), 0.0).sum(1)
    return total / batch.written_counts.clamp(min=1)


def turn_columns(batch: RolloutBatch) -> dict[str, Any]:
    """Which tokens the policy wrote, and who wrote the others; nothing where every response is one turn of its own."""
    segments = batch.all_segments()
    if segments is None:
        return {}
    parts = [part for own in segments for part in own]
    return {
        "loss_mask": batch.response_mask[batch.present].numpy(),
        "segment_offsets": offsets_of(np.array([len(own) for own in segments], np.int64)),
        "segment_start": np.array([part.start for part in parts], np.int32),
        "segment_turn": np.array([part.turn for part in parts], np.int32),
        "segment_role": np.array([SegmentRole[part.role.upper()] for part in parts], np.uint8),
        **names_columns("segment_tool", [part.tool for part in parts]),
    }


def reward_part_columns(batch: RolloutBatch, rows: Tensor) -> dict[str, Any]:
    """The parts of the rewards of `rows`, each with its name; nothing where rewards are no sums."""
    if batch.reward_parts is None:
        return {}
    own = [batch.reward_parts[row] for row in rows.tolist()]
    return {
        "reward_part_offsets": offsets_of(np.array([len(parts) for parts in own], np.int64)),
        "reward_part": np.array([value for parts in own for value in parts.values()], np.float32),
        **names_columns("reward_part_name", [name for parts in own for name in parts]),
    }


def followed_by(first: Any, count: int, value: float) -> np.ndarray:
    """Numbers with `count` times the same one after them."""
    numbers = np.asarray(first)
    return np.concatenate([numbers, np.full(count, value, numbers.dtype)])


def names_columns(column: str, names: list[str]) -> dict[str, Any]:
    """Names as one column of bytes, with offsets."""
    encoded = [name.encode() for name in names]
    offsets = offsets_of(np.array([len(name) for name in encoded], np.int64))
    return {column: np.frombuffer(b"".join(encoded), np.uint8), f"{column}_offsets": offsets}


def log_prob_columns(batch: RolloutBatch, rows: Tensor) -> dict[str, Any]:
    """Entropies, the trainer's log-probs, the sampler's and their ratio, as far as the host knows them."""
    sampled = batch.sampler_log_probs if bool(batch.sampler_log_probs.any()) else None
    known = {"entropy": batch.entropies, "log_prob": batch.old_log_probs, "sampler_log_prob": sampled}
    if sampled is not None and batch.old_log_probs is not None:
        known["ratio"] = (batch.old_log_probs - sampled).exp()
    return {name: token_column(values, batch, rows) for name, values in known.items() if values is not None}


def token_column(values: Tensor, batch: RolloutBatch, rows: Tensor) -> np.ndarray:
    """[R, T] → the flat tokens of `rows`; NaN at those that the policy did not write."""
    return torch.where(batch.response_mask[rows], values[rows], torch.nan)[batch.present[rows]].numpy()


def with_gaps(written: Any, batch: RolloutBatch, rows: Tensor, gap: float = np.nan) -> np.ndarray:
    """Numbers [n, …] of the tokens that the policy wrote → [N, …] of all tokens of `rows`, `gap` at the others."""
    values, own = np.asarray(written), batch.response_mask[rows][batch.present[rows]].numpy()
    if own.all():
        return values
    found = np.full((len(own), *values.shape[1:]), gap, values.dtype)
    found[own] = values
    return found
