"""`RolloutBatch`: columns that a stage relies on, and the one way to and from tensors."""

from __future__ import annotations

import pytest
import torch

from gradtrace.batch import COLUMNS, OPTIONAL_COLUMNS, RolloutBatch
from gradtrace.errors import GradtraceError
from gradtrace.rollout import SamplingParams
from tests.training import small


def test_a_missing_column_is_an_error_that_names_who_sets_it() -> None:
    batch = small.random_batch(groups=2, n=2, seed=1).only()
    with pytest.raises(GradtraceError, match=r"no advantages: the advantage estimator .* sets them"):
        batch.need("advantages")
    with_rewards = batch.replace(rewards=torch.ones(len(batch)))
    assert torch.equal(with_rewards.need("rewards"), torch.ones(len(batch)))


def test_a_batch_survives_the_way_to_tensors_and_back() -> None:
    batch = small.random_batch(groups=3, n=2, seed=1)
    again = RolloutBatch.from_tensors(batch.to_tensors(), items=batch.items, texts=batch.texts)
    assert again.prompts == batch.prompts and again.items == batch.items
    for name in COLUMNS:
        column = getattr(batch, name)
        assert getattr(again, name) is None if column is None else torch.equal(getattr(again, name), column)


def test_only_drops_every_other_column_that_a_fresh_rollout_does_not_have() -> None:
    batch = small.random_batch(groups=2, n=2, seed=1).replace(kept=torch.ones(4, dtype=torch.bool))
    bare = batch.only("advantages")
    assert [name for name in OPTIONAL_COLUMNS if getattr(bare, name) is not None] == ["advantages"]


def test_sampling_parameters_come_from_fields_of_the_same_names() -> None:
    class Section:
        n, temperature, top_p, unrelated = 3, 0.5, 0.9, "x"

    assert SamplingParams.of(Section(), (7,), top_p=1.0) == SamplingParams(
        n=3, temperature=0.5, top_p=1.0, stop_token_ids=(7,)
    )
