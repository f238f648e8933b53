"""Which response trains when, and on which rank: groups stay whole, ranks get equal work."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Balance = Callable[[list[int], int], list[list[int]]]
"""(work of each item, ranks) → the items of each rank, equally many."""


@dataclass(frozen=True)
class Plan:
    order: list[int]
    """Items in the order in which verl cuts them: rank by rank, and each rank's part mini-batch by mini-batch."""
    mini_batch: list[int]
    """Of each item."""
    whole: list[bool]
    """Of each item: its group lies in one mini-batch."""


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
