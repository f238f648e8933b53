"""The yardstick itself: real steps leave nothing behind, and a score that is exact agrees with them."""

from __future__ import annotations

import math

import pytest
import torch

from gradtrace.attribution import InfluenceConfig
from gradtrace.instruments.verify.measure import (
    interval,
    random_halves,
    ranks,
    single_responses,
    single_tokens,
    spearman,
)
from gradtrace.instruments.verify.trial import RealSteps, Trial
from gradtrace.intervals import paired_difference
from tests.attribution.models import random_responses, tiny_model


def trial(lr: float = 1e-5) -> Trial:
    """A tiny model after two steps of AdamW, and two groups of four responses."""
    model, batch = tiny_model("llama"), random_responses(groups=2, n=4, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.01)
    generator = torch.Generator().manual_seed(5)
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        optimizer.step()
    optimizer.zero_grad()
    return Trial(model, optimizer, batch.sequences, batch.prompt_lengths, batch.group, batch.accepted, batch.advantages)


def test_a_real_step_leaves_nothing_behind() -> None:
    tried = trial()
    weights = [p.detach().clone() for p in tried.model.parameters()]
    state = [v.clone() for p in tried.model.parameters() for v in tried.optimizer.state[p].values()]
    steps = RealSteps(tried.model, tried.optimizer)
    moved = steps.effect({}, lambda: next(tried.model.parameters()).detach().clone())
    assert not torch.equal(moved, weights[0])  # momentum and decay
    assert all(torch.equal(a, b) for a, b in zip(weights, tried.model.parameters(), strict=True))
    after = [v for p in tried.model.parameters() for v in tried.optimizer.state[p].values()]
    assert all(torch.equal(a, b) for a, b in zip(state, after, strict=True))


def test_a_state_that_was_empty_is_empty_again() -> None:
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters())
    RealSteps(model, optimizer).effect({}, lambda: torch.zeros(()))
    assert not optimizer.state


@pytest.mark.parametrize("credit", ["loss_term", "both"])
def test_scores_over_all_matrices_predict_real_steps(credit: str) -> None:
    tried = trial()
    for name, p in tried.model.named_parameters():  # then linear layers are all that a step moves
        p.requires_grad_("norm" not in name and "embed" not in name)
    tried.__post_init__()
    config = InfluenceConfig(projection_dim_factor=0, loss_term_prompts=0, module_name_filter=(".*",), credit=credit)
    trace = tried.traced(config, coming=False)
    own = dict(enumerate(trace.loss_term_scores))
    generator = torch.Generator().manual_seed(0)
    for group in (0, 1):
        assert single_tokens(tried, group, 0, generator).take_all(tried).agreement(own) > 0.9
        assert single_responses(tried, group).take_all(tried).agreement(own) > 0.9
        halves = random_halves(tried, [group], 8, "half_tokens", generator).take_all(tried)
        assert halves.agreement(own) > 0.9
    if credit == "both":  # later tokens' terms flow through a position, too
        tokens = single_tokens(tried, 0, 0, generator).take_all(tried)
        assert tokens.agreement(dict(enumerate(trace.position_scores))) < 0.99


def test_some_tokens_of_a_group_and_their_norms() -> None:
    tried = trial()
    found = single_tokens(tried, 0, 5, torch.Generator().manual_seed(0)).take_all(tried)
    assert len(found.chosen) == len(found.measured) == len(found.norms) == 5
    norms = found.squared_norms(tried)
    assert sum(int((values > 0).sum()) for values in norms.values()) == 5


def test_ranks_of_ties_and_correlations() -> None:
    assert ranks(torch.tensor([3.0, 1.0, 3.0, 2.0])).tolist() == [2.5, 0.0, 2.5, 1.0]
    up = torch.arange(5.0)
    assert spearman(up, up.exp()) == pytest.approx(1.0) and spearman(up, -up) == pytest.approx(-1.0)
    assert math.isnan(spearman(up, torch.ones(5)))


def test_intervals_are_paired_and_pass_over_what_is_undefined() -> None:
    first, second = [0.9, 0.5, math.nan, 0.7], [0.8, 0.4, 0.1, 0.6]
    assert interval(first).count == 3 and interval(first).low < interval(first).mean < interval(first).high
    gain = paired_difference(first, second)
    assert gain.mean == pytest.approx(0.1) and gain.low == pytest.approx(0.1)
    assert math.isnan(interval([math.nan]).mean)
