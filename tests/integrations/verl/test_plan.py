"""Which rank trains which response when."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from gradtrace.integrations.verl.assign import PADDING, deal, plan_selection, plan_update


@given(
    work=st.lists(st.integers(1, 50), max_size=20),
    ranks=st.integers(1, 4),
    multiple=st.integers(1, 3),
)
def test_every_item_is_dealt_once_and_ranks_have_equally_many_and_about_equal_work(
    work: list[int], ranks: int, multiple: int
) -> None:
    parts = deal(work, ranks, multiple)
    assert sorted(item for part in parts for item in part if item != PADDING) == list(range(len(work)))
    sizes = {len(part) for part in parts}
    assert len(parts) == ranks and len(sizes) == 1 and sizes.pop() % multiple == 0
    loads = [sum(work[item] for item in part if item != PADDING) for part in parts]
    assert max(loads) - min(loads) <= max(work, default=0)


def even(work: list[int], ranks: int) -> list[list[int]]:
    return [list(range(rank, len(work), ranks)) for rank in range(ranks)]


@given(
    prompts=st.integers(1, 4),
    mini_batches=st.integers(1, 3),
    n=st.integers(1, 4),
    ranks=st.integers(1, 4),
    seed=st.one_of(st.none(), st.integers(0, 9)),
)
def test_every_response_trains_once_and_groups_stay_whole(
    prompts: int, mini_batches: int, n: int, ranks: int, seed: int | None
) -> None:
    per_mini_batch = prompts * ranks * n
    groups = [str(i // n) for i in range(per_mini_batch * mini_batches)]
    plan = plan_update(groups, [1] * len(groups), per_mini_batch, ranks, even, seed)
    assert sorted(plan.order) == list(range(len(groups))) and all(plan.whole)
    # verl cuts the order into equal parts for the ranks, and each of those into equal mini-batches.
    per_rank, per_step = len(groups) // ranks, per_mini_batch // ranks
    rank_of = {}
    for place, item in enumerate(plan.order):
        assert plan.mini_batch[item] == place % per_rank // per_step
        rank_of.setdefault(groups[item], set()).add(place // per_rank)
    assert all(len(found) == 1 for found in rank_of.values())  # nothing has to travel


def test_more_ranks_than_groups_split_groups_but_not_over_mini_batches() -> None:
    groups = ["a"] * 4 + ["b"] * 4
    plan = plan_update(groups, [1] * 8, 4, 4, even, None)
    assert plan.mini_batch == [0] * 4 + [1] * 4 and all(plan.whole)
    assert [plan.mini_batch[item] for item in plan.order] == [0, 1] * 4


def test_a_group_across_two_mini_batches_is_marked() -> None:
    plan = plan_update(["a", "a", "a", "b"], [1] * 4, 2, 1, even, None)
    assert plan.whole == [False, False, False, True]


@given(
    kept=st.lists(st.lists(st.booleans(), min_size=1, max_size=4), min_size=1, max_size=6).filter(
        lambda groups: any(any(group) for group in groups)
    ),
    groups_per_step=st.integers(1, 4),
    ranks=st.integers(1, 4),
    multiple=st.integers(1, 3),
    seed=st.one_of(st.none(), st.integers(0, 9)),
)
def test_after_a_selection_every_kept_response_trains_once_and_no_other(
    kept: list[list[bool]], groups_per_step: int, ranks: int, multiple: int, seed: int | None
) -> None:
    group = torch.tensor([number for number, members in enumerate(kept) for _ in members])
    flags = torch.tensor([flag for members in kept for flag in members])
    plan = plan_selection(group, flags, groups_per_step, ranks, multiple, seed)
    assert sorted(row for row in plan.order if row != PADDING) == flags.nonzero().squeeze(-1).tolist()
    assert bool(((plan.mini_batch >= 0) == flags).all())
    alive = int(sum(any(members) for members in kept))
    steps = -(-alive // groups_per_step)  # as many optimizer steps as the embedded loop makes
    per_rank, per_step = len(plan.order) // ranks, plan.size // ranks
    assert len(plan.order) == steps * plan.size and per_step % multiple == 0
    for place, row in enumerate(plan.order):
        if row != PADDING:
            assert plan.mini_batch[row] == place % per_rank // per_step
    for number in range(len(kept)):  # whole groups
        assert len(set(plan.mini_batch[(group == number) & flags].tolist())) <= 1
    for step in range(steps):
        counts = [
            sum(row != PADDING for row in plan.order[begin : begin + per_step])
            for begin in range(step * per_step, len(plan.order), per_rank)
        ]
        assert max(counts) - min(counts) <= 1
