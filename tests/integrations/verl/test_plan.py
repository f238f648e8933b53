"""Which rank trains which response when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradtrace.integrations.verl.plan import plan_update


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
