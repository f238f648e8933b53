"""Identity 3: every solver equals dense Cholesky on the explicit H."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradtrace.attribution.collectives import Ranks
from gradtrace.attribution.errors import AttributionError
from gradtrace.attribution.factors.solvers import (
    MAX_DENSE_DIM,
    Damping,
    TokenRows,
    cheapest_token_solver,
    make_curvature,
)


def problem(tokens: int, k_out: int, k_in: int, n: int, dtype: torch.dtype, seed: int, calls: int = 1) -> tuple:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    # Factors with decaying spectra, as real ones have.
    u = random(2, calls * tokens, k_out) * torch.logspace(0, -1.5, k_out, dtype=torch.float64)
    v = random(2, calls * tokens, k_in) * torch.logspace(0, -1.5, k_in, dtype=torch.float64)
    gradients = random(2, n, k_out, k_in)  # two scopes side by side
    rows = TokenRows(u.to(dtype), v.to(dtype), tokens)
    return gradients.to(dtype), rows


def solve(gradients: torch.Tensor, rows: TokenRows, source: str, solver: str, reg_lambda: float) -> tuple:
    curvature = make_curvature(
        gradients,
        rows,
        source=source,
        solver=solver,
        damping=Damping(reg_lambda, "per_dimension"),
        ranks=Ranks(),
    )
    weights = torch.eye(gradients.shape[1], dtype=gradients.dtype)
    return curvature.directions(weights), curvature.token_scores(weights), curvature.kernel()


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 30),
    k_out=st.integers(1, 7),
    k_in=st.integers(1, 7),
    n=st.integers(1, 5),
    reg_lambda=st.sampled_from([0.0, 1e-2, 10.0]),
    calls=st.integers(1, 2),
    seed=st.integers(0, 1000),
)
@pytest.mark.parametrize("source, solver", [("token", "gram"), ("token", "cg"), ("response", "response")])
def test_solver_equals_dense_cholesky(
    source: str,
    solver: str,
    tokens: int,
    k_out: int,
    k_in: int,
    n: int,
    reg_lambda: float,
    calls: int,
    seed: int,
) -> None:
    gradients, rows = problem(tokens, k_out, k_in, n, torch.float64, seed, calls)
    dense = solve(gradients, rows, source, "dense", reg_lambda)
    for ours, theirs in zip(solve(gradients, rows, source, solver, reg_lambda), dense, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-8


@pytest.mark.parametrize("solver", ["gram", "cg"])
def test_float32_solvers_agree_to_a_thousandth(solver: str) -> None:
    gradients, rows = problem(300, 18, 12, 8, torch.float64, seed=3)
    _, dense, _ = solve(gradients, rows, "token", "dense", 0.0)
    single = TokenRows(rows.u.float(), rows.v.float(), rows.count)
    _, scores, _ = solve(gradients.float(), single, "token", solver, 0.0)
    assert float((scores.double() - dense).norm() / dense.norm()) < 1e-3


def test_a_module_without_gradient_solves_to_zero() -> None:
    gradients, rows = torch.zeros(1, 3, 2, 2), TokenRows(torch.zeros(1, 5, 2), torch.zeros(1, 5, 2), 5)
    for source, solver in (("response", "auto"), ("token", "gram"), ("token", "cg"), ("token", "dense")):
        for part in solve(gradients, rows, source, solver, 0.0):
            assert torch.equal(part, torch.zeros_like(part))


def test_no_big_matrix_is_ever_formed_by_itself() -> None:
    assert cheapest_token_solver(tokens=2000, k_out=96, k_in=144, columns=16, split=False) == "gram"
    assert cheapest_token_solver(tokens=2000, k_out=96, k_in=144, columns=16, split=True) == "cg"
    assert cheapest_token_solver(tokens=50_000, k_out=96, k_in=144, columns=1, split=False) == "cg"
    assert cheapest_token_solver(tokens=5_000, k_out=4, k_in=4, columns=16, split=False) == "dense"
    side = int(MAX_DENSE_DIM**0.5) + 1
    assert cheapest_token_solver(tokens=10**6, k_out=side, k_in=side, columns=10**6, split=True) == "cg"


def test_gram_refuses_a_group_that_is_split_over_ranks() -> None:
    gradients, rows = problem(4, 2, 2, 2, torch.float64, 0)
    ranks = Ranks()
    ranks.size = 2
    with pytest.raises(AttributionError, match="split"):
        make_curvature(
            gradients,
            rows,
            source="token",
            solver="gram",
            damping=Damping(0.0, "per_dimension"),
            ranks=ranks,
        )
