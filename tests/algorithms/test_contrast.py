"""Accepted, rejected, constant, mixed: SCIENCE.md section 1."""

from __future__ import annotations

import math

import pytest
import torch

from gradtrace.algorithms import accepted, constant_groups, count_groups, rejected
from gradtrace.errors import GradtraceError

# group 2: mixed with a tie at the top; group 0: constant; group 7: mixed below zero; group 4: one response
GROUP = torch.tensor([2, 0, 2, 7, 2, 0, 7, 4])
REWARDS = torch.tensor([1.0, 0.5, 0.0, -1.0, 1.0, 0.5, -2.0, 1.0])


def test_accepted_are_the_best_of_groups_whose_rewards_differ() -> None:
    assert accepted(REWARDS, GROUP).nonzero().squeeze(-1).tolist() == [0, 3, 4]
    assert rejected(REWARDS, GROUP).nonzero().squeeze(-1).tolist() == [2, 6]


def test_constant_groups_are_neither_accepted_nor_rejected() -> None:
    constant = constant_groups(REWARDS, GROUP)
    assert constant.nonzero().squeeze(-1).tolist() == [1, 5, 7]
    assert torch.equal(accepted(REWARDS, GROUP) | rejected(REWARDS, GROUP), ~constant)


def test_groups_are_counted_as_groups() -> None:
    counts = count_groups(REWARDS, GROUP)
    assert (counts.total, counts.constant, counts.mixed) == (4, 2, 2)


def test_an_empty_batch_has_no_groups() -> None:
    counts = count_groups(torch.zeros(0), torch.zeros(0, dtype=torch.long))
    assert (counts.total, counts.constant, counts.mixed) == (0, 0, 0)


def test_a_reward_that_is_not_a_number_is_an_error() -> None:
    with pytest.raises(GradtraceError, match="response 1"):
        accepted(torch.tensor([1.0, math.nan]), torch.tensor([0, 0]))
