"""Identity 11, and the rule for the dimensions."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from gradtrace.attribution.factors.layers import projected_dims, rademacher
from tests.attribution.models import random_responses, tiny_model
from tests.attribution.scoring import engine_scores, exact_config


def inner_product_errors(k: int, repeats: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, generator=generator, dtype=torch.float64)
    y = x + torch.randn(64, generator=generator, dtype=torch.float64)
    true = x @ y
    projections = [rademacher("layer", "in", k, 64, seed, torch.float64) for seed in range(repeats)]
    return torch.stack([((p @ x) @ (p @ y) - true) / true for p in projections])


def test_projected_inner_products_are_unbiased() -> None:
    errors = inner_product_errors(k=8, repeats=2000)
    standard_error = errors.std() / len(errors) ** 0.5
    assert abs(errors.mean()) < 4 * standard_error


def test_error_falls_with_the_square_root_of_k() -> None:
    ratio = inner_product_errors(4, 2000).std() / inner_product_errors(64, 2000).std()
    assert 3.5 < ratio < 4.6  # √16 = 4


@given(
    d_out=st.integers(1, 5000),
    d_in=st.integers(1, 5000),
    factor=st.integers(1, 600),
    cap_sum=st.sampled_from([-1, 0, 2, 7, 64]),
    cap_product=st.sampled_from([-1, 0, 1, 9, 400]),
)
def test_dimensions_obey_both_caps(d_out: int, d_in: int, factor: int, cap_sum: int, cap_product: int) -> None:
    k_out, k_in = projected_dims(d_out, d_in, factor, cap_sum, cap_product)
    assert 1 <= k_out <= max(1, d_out // factor) and 1 <= k_in <= max(1, d_in // factor)
    if cap_sum > 0:
        assert k_out + k_in <= cap_sum
    if cap_product > 0:
        assert k_out * k_in <= cap_product
    if cap_sum <= 0 and cap_product <= 0:
        assert (k_out, k_in) == (max(1, d_out // factor), max(1, d_in // factor))


def test_factor_zero_is_exact_whatever_the_caps() -> None:
    assert projected_dims(576, 1536, 0, 8, 8) == (576, 1536)


def test_the_larger_side_shrinks_first() -> None:
    assert projected_dims(1536, 576, 32, max_vector_sum=40) == (22, 18)


def test_a_projection_depends_on_name_side_and_seed_only() -> None:
    first = rademacher("a", "in", 4, 9, 0, torch.float32)
    torch.rand(3)  # the global generator is neither read nor moved
    assert torch.equal(first, rademacher("a", "in", 4, 9, 0, torch.float32))
    for other in (("b", "in", 0), ("a", "out", 0), ("a", "in", 1)):
        assert not torch.equal(first, rademacher(other[0], other[1], 4, 9, other[2], torch.float32))


def test_projected_scores_scatter_around_the_exact_ones() -> None:
    model, batch = tiny_model(), random_responses(groups=1, n=4)
    exact = torch.cat(engine_scores(model, batch, exact_config(hessian_mode="identity")).token_scores)
    seeds = [
        torch.cat(
            engine_scores(
                model, batch, exact_config(hessian_mode="identity", projection_dim_factor=2, seed=seed)
            ).token_scores
        )
        for seed in range(60)
    ]
    scores = torch.stack(seeds)
    standard_error = scores.std(0) / len(seeds) ** 0.5
    assert bool(((scores.mean(0) - exact).abs() < 4.5 * standard_error).all())
