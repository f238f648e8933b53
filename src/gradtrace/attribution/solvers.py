"""Applying H⁻¹ of one module without forming H.

Everything here is about one block and one scope: n response gradients M [n, k_out, k_in] and T tokens with
factors U, V. Right-hand sides are always combinations of response gradients, given by their weights W [m, n]:
q_j = Σ_r W_jr M_r. Each curvature answers three questions about Z_j = H⁻¹ q_j:

- `directions(W)` [m, k_out, k_in]: Z itself,
- `token_scores(W)` [T, m]: g_t · Z_j,
- `kernel()` [n, n]: M_r · H⁻¹ M_s.

Identities used: (GᵀG+λI)⁻¹Gᵀ = Gᵀ(GGᵀ+λI)⁻¹ for the small systems, Woodbury for the directions of `gram`,
conjugate gradients on H·X = Uᵀ diag(u_tᵀXv_t) V + λX where neither T nor D is small.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradtrace.attribution.collectives import Ranks
from gradtrace.attribution.errors import AttributionError

MAX_DENSE_DIM = 2048
"""`auto` forms a D×D matrix only up to this D (32 MB in float64)."""
MAX_GRAM_TOKENS = 12_288
"""… and a T×T matrix only up to this T (600 MB in float32)."""
CG_EXPECTED_ITERATIONS = 40
CG_MAX_ITERATIONS = 1000
CHUNK_ELEMENTS = 1 << 24
"""Bound on the intermediate of one contraction (64 MB in float32)."""


@dataclass(eq=False)
class TokenRows:
    """Factors of the tokens of a scope that live on this rank."""

    u: Tensor
    """[rows, k_out]"""
    v: Tensor
    """[rows, k_in]"""
    count: int
    """T: the number of tokens."""
    token: Tensor | None = None
    """long[rows]: the token of each row when a module was called more than once; None means row = token."""

    def contract(self, x: Tensor) -> Tensor:
        """[m, k_out, k_in] → [T, m]: u_tᵀ X_j v_t."""
        columns, k_out, k_in = x.shape
        scores = self.u.new_empty(len(self.u), columns)
        flat = x.permute(1, 0, 2).reshape(k_out, columns * k_in)
        step = max(1, CHUNK_ELEMENTS // max(1, columns * k_in))
        for start in range(0, len(self.u), step):
            rows = slice(start, start + step)
            left = (self.u[rows] @ flat).view(-1, columns, k_in)
            scores[rows] = torch.bmm(left, self.v[rows, :, None]).squeeze(-1)
        return self._to_tokens(scores)

    def accumulate(self, weights: Tensor) -> Tensor:
        """[T, m] → [m, k_out, k_in]: Σ_t w_tj u_t v_tᵀ."""
        rows = weights if self.token is None else weights[self.token]
        return torch.stack([(self.u * rows[:, j, None]).T @ self.v for j in range(rows.shape[1])])

    def gram(self) -> Tensor:
        """[T, T]: g_t · g_s = (u_t · u_s)(v_t · v_s)."""
        gram = (self.u @ self.u.T).mul_(self.v @ self.v.T)
        return gram if self.token is None else self._to_tokens(self._to_tokens(gram).T.contiguous())

    def trace(self) -> Tensor:
        """Σ_t |g_t|²."""
        if self.token is None:
            return (self.u.square().sum(1) * self.v.square().sum(1)).sum()
        return self.explicit().square().sum()

    def explicit(self) -> Tensor:
        """[T, D]: the gradients themselves."""
        return self._to_tokens(torch.einsum("to,ti->toi", self.u, self.v).flatten(1))

    def _to_tokens(self, rows: Tensor) -> Tensor:
        if self.token is None:
            return rows
        return rows.new_zeros(self.count, rows.shape[1]).index_add_(0, self.token, rows)


class Curvature:
    """H = I; the others override how H⁻¹ is applied."""

    name = "identity"

    def __init__(self, gradients: Tensor, tokens: TokenRows) -> None:
        self.gradients = gradients
        self.tokens = tokens

    def combine(self, weights: Tensor) -> Tensor:
        """q = W M: [m, k_out, k_in]."""
        return torch.tensordot(weights, self.gradients, dims=1)

    def directions(self, weights: Tensor) -> Tensor:
        return self.combine(weights)

    def token_scores(self, weights: Tensor) -> Tensor:
        return self.tokens.contract(self.directions(weights))

    def kernel(self) -> Tensor:
        everything = torch.eye(len(self.gradients), dtype=self.gradients.dtype, device=self.gradients.device)
        return self.gradients.flatten(1) @ self.directions(everything).flatten(1).T


class ResponseCurvature(Curvature):
    """H = Σ_r M_r M_rᵀ + λI through the n×n matrix K_rs = ⟨M_r, M_s⟩; exact at any D."""

    name = "response"

    def __init__(self, gradients: Tensor, tokens: TokenRows, reg_lambda: float) -> None:
        super().__init__(gradients, tokens)
        flat = gradients.flatten(1)
        self.gram = flat @ flat.T
        damping = damping_of(reg_lambda, self.gram.diagonal().sum(), flat.shape[1])
        # n×n, so float64 costs nothing and keeps λ = 0.1·tr/D visible beside the largest eigenvalue.
        system = self.gram.double() + torch.diag(damping.double().expand(len(flat)))
        self.inverse = torch.cholesky_inverse(torch.linalg.cholesky_ex(system)[0]).to(gradients.dtype)

    def directions(self, weights: Tensor) -> Tensor:
        return self.combine(weights @ self.inverse)

    def kernel(self) -> Tensor:
        return self.gram @ self.inverse


class TokenGramCurvature(Curvature):
    """H = Σ_t g_t g_tᵀ + λI through the T×T Gram matrix of the tokens."""

    name = "gram"

    def __init__(self, gradients: Tensor, tokens: TokenRows, reg_lambda: float) -> None:
        super().__init__(gradients, tokens)
        system = tokens.gram()
        self.damping = damping_of(reg_lambda, system.diagonal().sum(), gradients[0].numel())
        system.diagonal().add_(self.damping)
        self.factor = cholesky(system)
        self.cross = tokens.contract(gradients)  # [T, n]: g_t · M_r

    def token_scores(self, weights: Tensor) -> Tensor:
        return torch.cholesky_solve(self.cross @ weights.T, self.factor)

    def directions(self, weights: Tensor) -> Tensor:
        removed = self.tokens.accumulate(self.token_scores(weights))
        return (self.combine(weights) - removed) / self.damping

    def kernel(self) -> Tensor:
        flat = self.gradients.flatten(1)
        explained = self.cross.T @ torch.cholesky_solve(self.cross, self.factor)
        return (flat @ flat.T - explained) / self.damping


class DenseCurvature(Curvature):
    """H formed and factored: D×D. For small D, and to check the others."""

    name = "dense"

    def __init__(
        self, gradients: Tensor, tokens: TokenRows, reg_lambda: float, source: str, ranks: Ranks
    ) -> None:
        super().__init__(gradients, tokens)
        rows = gradients.flatten(1) if source == "response" else tokens.explicit()
        hessian = rows.T @ rows
        if source == "token":
            ranks.sum(hessian)
        hessian.diagonal().add_(damping_of(reg_lambda, hessian.diagonal().sum(), len(hessian)))
        self.factor = cholesky(hessian)

    def directions(self, weights: Tensor) -> Tensor:
        combined = self.combine(weights)
        return torch.cholesky_solve(combined.flatten(1).T, self.factor).T.reshape(combined.shape)


class TokenCGCurvature(Curvature):
    """H = Σ_t g_t g_tᵀ + λI by conjugate gradients. Over several ranks only D-sized vectors travel."""

    name = "cg"

    def __init__(self, gradients: Tensor, tokens: TokenRows, reg_lambda: float, ranks: Ranks) -> None:
        super().__init__(gradients, tokens)
        self.ranks = ranks
        trace = ranks.sum(tokens.trace())
        self.damping = damping_of(reg_lambda, trace, gradients[0].numel())
        self.iterations = 0

    def _product(self, x: Tensor) -> Tensor:
        product = self.tokens.accumulate(self.tokens.contract(x))
        return self.ranks.sum(product).add_(x * self.damping)

    def directions(self, weights: Tensor) -> Tensor:
        solution, self.iterations = conjugate_gradients(self._product, self.combine(weights))
        return solution


def damping_of(reg_lambda: float, trace: Tensor, dim: int) -> Tensor:
    """λ: as given, or a tenth of the mean eigenvalue. Never 0, so that an all-zero module solves to zero."""
    damping = torch.full_like(trace, reg_lambda) if reg_lambda > 0 else 0.1 * trace / dim
    return damping.clamp(min=torch.finfo(trace.dtype).tiny * 1e6)


def cholesky(matrix: Tensor) -> Tensor:
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if int(failed) and bool(torch.isfinite(matrix).all()):
        raise AttributionError(
            f"the regularised Hessian of size {len(matrix)} is not positive definite in {matrix.dtype}: raise"
            " reg_lambda (or leave it at 0 for the automatic value)"
        )
    return factor


def conjugate_gradients(product: Callable[[Tensor], Tensor], target: Tensor) -> tuple[Tensor, int]:
    """Solves H X_j = target_j for all j at once, to the working precision. Returns X and the iterations used."""
    shape = target.shape
    residual = target.flatten(1).clone()
    solution = torch.zeros_like(residual)
    search = residual.clone()
    squared = residual.square().sum(1)
    tolerance = 1e-12 if target.dtype == torch.float64 else 1e-6
    goal = squared * tolerance**2
    for iteration in range(CG_MAX_ITERATIONS):
        active = squared > goal
        if not bool(active.any()):
            return solution.view(shape), iteration
        image = product(search.view(shape)).flatten(1)
        curvature = (search * image).sum(1)
        step = torch.where(active, squared / curvature.clamp(min=torch.finfo(target.dtype).tiny), 0.0)
        solution += step[:, None] * search
        residual -= step[:, None] * image
        renewed = residual.square().sum(1)
        search = residual + torch.where(active, renewed / squared, 0.0)[:, None] * search
        squared = renewed
    return solution.view(shape), CG_MAX_ITERATIONS


def cheapest_token_solver(tokens: int, k_out: int, k_in: int, columns: int, split: bool) -> str:
    """`gram`, `cg` or `dense` by estimated multiplications. Split over ranks, the Gram matrix is out of reach."""
    dim = k_out * k_in
    costs = {"cg": CG_EXPECTED_ITERATIONS * 2 * tokens * dim * columns}
    if dim <= MAX_DENSE_DIM:
        costs["dense"] = tokens * dim**2 + dim**3 // 3
    if not split and tokens <= MAX_GRAM_TOKENS:
        costs["gram"] = (
            tokens**2 * (k_out + k_in) + tokens**3 // 3 + tokens**2 * columns + tokens * dim * columns
        )
    return min(costs, key=lambda name: costs[name])


def make_curvature(
    gradients: Tensor,
    tokens: TokenRows,
    *,
    mode: str,
    source: str,
    solver: str,
    reg_lambda: float,
    columns: int,
    ranks: Ranks,
) -> Curvature:
    """`ranks` are those the scope is split over; `columns` is how many right-hand sides will be asked for."""
    if mode == "identity":
        return Curvature(gradients, tokens)
    if source == "response" and solver != "dense":
        return ResponseCurvature(gradients, tokens, reg_lambda)
    if solver == "auto":
        k_out, k_in = gradients.shape[1:]
        solver = cheapest_token_solver(tokens.count, k_out, k_in, columns, ranks.size > 1)
        # Ranks hold different numbers of tokens and must still agree.
        solver = ranks.gather(solver)[0]
    if solver == "dense":
        return DenseCurvature(gradients, tokens, reg_lambda, source, ranks)
    if solver == "gram":
        if ranks.size > 1:
            raise AttributionError(
                "solver='gram' needs all tokens of a group on one rank, and this group is split; use 'cg' or 'auto'"
            )
        return TokenGramCurvature(gradients, tokens, reg_lambda)
    return TokenCGCurvature(gradients, tokens, reg_lambda, ranks)
