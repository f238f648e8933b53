"""Which response goes to which rank, and when: groups stay whole where they train, and ranks get equal work."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

Balance = Callable[[list[int], int], list[list[int]]]
"""(work of each item, ranks) → the items of each rank, equally many."""
PADDING = -1
"""Stands for a row that only fills up, so that all ranks have equally many."""


def deal(work: Sequence[int], ranks: int, multiple: int = 1) -> list[list[int]]:
    """The items of each rank, dealt by size, to and fro: 0 1 2 2 1 0 0 1 2 … Ranks with fewer are filled up with
    PADDING: all have equally many, at least one and a multiple of `multiple`."""
    order = sorted(range(len(work)), key=lambda item: (-work[item], item))
    size = max(1, -(-len(order) // (ranks * multiple))) * multiple
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for place, item in enumerate(order):
        lap, seat = divmod(place, ranks)
        parts[seat if lap % 2 == 0 else ranks - 1 - seat].append(item)
    return [[*part, *[PADDING] * (size - len(part))] for part in parts]


# ---------------------------------------------------------------- an update


@dataclass(frozen=True)
class Plan:
    order: list[int]
    """Items in the order in which verl cuts them: rank by rank, and each rank's part mini-batch by mini-batch."""
    mini_batch: list[int]
    """The mini-batch of each item."""
    whole: list[bool]
    """Whether the group of each item lies in one mini-batch."""


def plan_update(
    groups: Sequence[str],
    work: Sequence[int],
    per_mini_batch: int,
    ranks: int,
    balance: Balance,
    seed: int | None,
) -> Plan:
    """`groups`: the group of each item. `per_mini_batch`: items per optimizer step, of all ranks. With a `seed` groups
    are dealt to mini-batches at random, else in the order in which they come."""
    members: dict[str, list[int]] = {}
    for item, group in enumerate(groups):
        members.setdefault(group, []).append(item)
    order = list(members)
    if seed is not None:
        random.Random(seed).shuffle(order)
    dealt = [item for group in order for item in members[group]]
    mini_batch = [0] * len(dealt)
    for place, item in enumerate(dealt):
        mini_batch[item] = place // per_mini_batch
    whole_groups = {group: len({mini_batch[item] for item in items}) == 1 for group, items in members.items()}
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for begin in range(0, len(dealt), per_mini_batch):
        items = dealt[begin : begin + per_mini_batch]
        for part, chosen in zip(parts, share(items, groups, work, ranks, balance), strict=True):
            part += chosen
    return Plan(
        order=[item for part in parts for item in part],
        mini_batch=mini_batch,
        whole=[whole_groups[group] for group in groups],
    )


def share(
    items: list[int], groups: Sequence[str], work: Sequence[int], ranks: int, balance: Balance
) -> list[list[int]]:
    """The items of a mini-batch, siblings side by side, for each rank. Groups stay whole where they can: what belongs
    to a group that is split has to travel between ranks for its scores."""
    members: dict[str, list[int]] = {}
    for item in items:
        members.setdefault(groups[item], []).append(item)
    whole = list(members.values())
    if len({len(group) for group in whole}) == 1 and len(whole) % ranks == 0:
        chosen = balance([sum(work[item] for item in group) for group in whole], ranks)
        return [[item for index in sorted(part) for item in whole[index]] for part in chosen]
    size = len(items) // ranks
    return [items[rank * size : (rank + 1) * size] for rank in range(ranks)]


# ---------------------------------------------------------------- after a selection


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
    """Plan the update as the embedded loop does: `groups_per_step` groups with a kept response make an optimizer step,
    in order or, with a `seed`, at random. Every rank gets about equally many of its responses, siblings together where
    it goes; all are filled up to one size, a multiple of `multiple` on each rank."""
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
