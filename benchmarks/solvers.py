"""Applying the inverse Hessian of one layer: our solvers against dense Cholesky on the explicit H.

Both sides give the same thing: the influence of each of T tokens on each of n responses, in float32. Dense is
what other implementations do: form the D×D matrix, factor it, solve. Ours never forms it. Peak memory is the
resident set of a fresh process above its inputs; errors are relative to dense in float64 where that fits (D ≤ 5,184),
else to dense in float32.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Timing, alternate, emit, parse_arguments, peak_memory
from gradtrace.attribution.collectives import Ranks
from gradtrace.attribution.factors.solvers import Damping, TokenRows, cheapest_token_solver, make_curvature

SIZES = {1296: (36, 36), 5184: (72, 72), 13824: (96, 144)}
TOKENS, RESPONSES = 2048, 16
MAX_FLOAT64_DIM = 5184


def factors(dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, TokenRows]:
    """Factors whose spectra fall off as those of real layers do, and response gradients made of them."""
    k_out, k_in = SIZES[dim]
    generator = torch.Generator().manual_seed(dim)

    def side(width: int) -> Tensor:
        scales = torch.logspace(0, -1.5, width, dtype=torch.float64)
        mixing = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))[0]
        return (torch.randn(TOKENS, width, generator=generator, dtype=torch.float64) * scales) @ mixing

    u, v = side(k_out), side(k_in)
    owner = torch.arange(TOKENS) % RESPONSES
    gradients = torch.stack([u[owner == r].T @ v[owner == r] for r in range(RESPONSES)]) / (TOKENS / RESPONSES)
    return gradients[None].to(dtype), TokenRows(u[None].to(dtype), v[None].to(dtype), TOKENS)


def influences(problem: tuple[Tensor, TokenRows], source: str, solver: str) -> Tensor:
    """[T, n]"""
    gradients, rows = problem
    curvature = make_curvature(
        gradients,
        rows,
        source=source,
        solver=solver,
        damping=Damping(0.0, "per_dimension"),
        ranks=Ranks(),
    )
    return curvature.token_scores(torch.eye(RESPONSES, dtype=gradients.dtype))[0]


def _prepare(dim: int, source: str, solver: str) -> tuple[tuple[Tensor, TokenRows], str, str]:
    return factors(dim), source, solver


def _work(prepared: tuple[tuple[Tensor, TokenRows], str, str]) -> None:
    influences(*prepared)


def extra_bytes(dim: int, source: str, solver: str) -> int:
    return peak_memory(_prepare, _work, dim, source, solver).extra_bytes


def compare(dim: int, source: str, solvers: tuple[str, ...], rounds: int) -> tuple[Timing, dict[str, Any]]:
    problem = factors(dim)
    chosen = "response" if source == "response" else cheapest_token_solver(TOKENS, *SIZES[dim], RESPONSES, False)
    found: dict[str, Tensor] = {}

    def solve(solver: str) -> None:
        found[solver] = influences(problem, source, solver)

    solve("auto")  # warms up what is fast; a factorisation of seconds needs no warming
    dense, ours = functools.partial(solve, "dense"), functools.partial(solve, "auto")
    timing = alternate(dense, ours, rounds, warmup=0 if rounds == 1 or dim > MAX_FLOAT64_DIM else 1)
    truth = found["dense"].double()
    if dim <= MAX_FLOAT64_DIM:
        truth = influences(factors(dim, torch.float64), source, "dense")
    errors = {}
    for solver in solvers:
        scores = influences(problem, source, solver).double()
        errors[solver] = float((scores - truth).norm() / truth.norm())
    dense_bytes, our_bytes = extra_bytes(dim, source, "dense"), max(1, extra_bytes(dim, source, "auto"))
    detail = timing.detail() | {
        "solver": chosen,
        "relative_error": errors,
        "dense_extra_mb": round(dense_bytes / 2**20, 1),
        "ours_extra_mb": round(our_bytes / 2**20, 1),
        "memory_ratio": round(dense_bytes / our_bytes, 1),
    }
    return timing, detail


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments)
    ratios: dict[str, float | Timing] = {}
    detail = {}
    for dim in SIZES:
        if args.quick and dim > 5184:
            continue
        rounds = {1296: 9, 5184: 6, 13824: 3}[dim]
        for source, solvers in (("token", ("gram", "cg")), ("response", ("response",))):
            if source == "response" and dim < 13824:
                rounds = 9  # a few milliseconds on our side: a single hiccup would decide
            timing, found = compare(dim, source, solvers, 1 if args.quick else rounds)
            ratios[f"speedup_{source}_{dim}"] = timing
            ratios[f"memory_{source}_{dim}"] = found["memory_ratio"]
            detail[f"{source}_{dim}"] = found
            print(f"{source} curvature, D = {dim:>6,}: {timing.ratio:8.1f}× faster, {found}", flush=True)
    emit("solvers", ratios, detail)


if __name__ == "__main__":
    main()
