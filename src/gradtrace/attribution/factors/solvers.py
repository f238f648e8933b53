"""Applying H⁻¹ of one module without forming H.

Everything here is about one block and S scopes of n responses each, side by side: response gradients M
[S, n, k_out, k_in] and factors U, V of T tokens per scope. Right-hand sides are always combinations of response
gradients, given by their weights W [S, m, n]: q_j = Σ_r W_jr M_r. Each curvature answers three questions about
Z_j = H⁻¹ q_j:

- `directions(W)` [S, m, k_out, k_in]: Z itself,
- `token_scores(W)` [S, T, m]: g_t · Z_j,
- `kernel()` [S, n, n]: M_r · H⁻¹ M_s.

Identities used: (GᵀG+λI)⁻¹Gᵀ = Gᵀ(GGᵀ+λI)⁻¹ for the small systems, Woodbury for the directions of `gram`,
conjugate gradients on H·X = Uᵀ diag(u_tᵀXv_t) V + λX where neither T nor D is small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradtrace.attribution.collectives import Ranks
from gradtrace.attribution.errors import AttributionError

MAX_DENSE_DIM = 2048
"""`auto` forms a D×D matrix only up to this D (32 MB in float64)."""
MAX_GRAM_TOKENS = 12_288
"""… and a T×T matrix only up to this T (600 MB in float32)."""
CG_EXPECTED_ITERATIONS = 100
CG_MAX_ITERATIONS = 1000
FACTORING = 3
"""A multiplication inside a Cholesky factorisation takes about so many times that of one in a matmul."""
MAX_DOF_SIZE = 1024
"""Effective degrees of freedom of token curvature are worked out up to this many tokens; it takes another inverse."""
FEW = 32
"""Up to so many terms a product of small matrices is faster than multiplying and adding up; it is slower beyond."""
CHUNK_ELEMENTS = 1 << 24
"""Bound on the intermediate of one contraction (64 MB in float32)."""


@dataclass(frozen=True)
class Damping:
    """How λ of H = (a sum of outer products) + λI is chosen."""

    given: float = 0.0
    """λ itself, if above 0."""
    rule: str = "per_row"
    """Else `per_row`: scale · trace / number of products in the sum; `per_dimension`: 0.1 · trace / D."""
    scale: float = 1.0
    dims: Tensor | None = None
    """long[S]: the D of each scope, where gradients may be filled up with zeros; None: as many as they have."""

    def of(self, trace: Tensor, rows: Tensor, dim: int) -> Tensor:
        """λ [S], for sums of `rows` [S] outer products. Never 0: an all-zero module solves to zero."""
        if self.given > 0:
            damping = torch.full_like(trace, self.given)
        elif self.rule == "per_dimension":
            damping = 0.1 * trace / (dim if self.dims is None else self.dims.to(trace))
        else:
            damping = self.scale * trace / rows.to(trace).clamp(min=1)
        return damping.clamp(min=1e-32)


@dataclass(eq=False)
class TokenRows:
    """Factors of the tokens of S scopes that live on this rank; tokens that are padding have zero factors."""

    u: Tensor
    """[S, P·T, k_out]: a module called P times in a pass has P rows per token, row p·T + t belonging to token t."""
    v: Tensor
    """[S, P·T, k_in]"""
    count: int
    """T"""
    real: Tensor | None = None
    """long[S]: how many of the T are tokens and not padding; None = all."""

    def numbers(self) -> Tensor:
        """float[S]: tokens of each scope."""
        if self.real is None:
            return torch.full((len(self.u),), float(self.count))
        return self.real.float()

    @property
    def calls(self) -> int:
        return self.u.shape[1] // self.count if self.count else 1

    def contract(self, x: Tensor) -> Tensor:
        """[S, m, k_out, k_in] → [S, T, m]: u_tᵀ X_j v_t."""
        u, v = self.u, self.v
        if u.shape[2] < v.shape[2]:  # multiply the longer side first: what is left to sum over is the shorter one
            u, v, x = v, u, x.transpose(2, 3)
        scopes, columns, first, second = x.shape
        scores = u.new_empty(scopes, u.shape[1], columns)
        if first <= columns:  # a token's gradient is no larger than its products with one side
            for rows in self._chunks(first * second):
                outer = u[:, rows].mT.contiguous()[:, :, None] * v[:, rows].mT.contiguous()[:, None]
                scores[:, rows] = torch.bmm(x.flatten(2), outer.flatten(1, 2)).mT
            return self._to_tokens(scores)
        flat = x.permute(0, 2, 1, 3).reshape(scopes, first, columns * second)
        for rows in self._chunks(columns * second):
            left = torch.bmm(u[:, rows], flat).view(scopes, -1, columns, second)
            if second < FEW:
                scores[:, rows] = torch.matmul(left, v[:, rows, :, None]).squeeze(-1)
            else:
                scores[:, rows] = left.mul_(v[:, rows, None]).sum(-1)
        return self._to_tokens(scores)

    def accumulate(self, weights: Tensor) -> Tensor:
        """[S, T, m] → [S, m, k_out, k_in]: Σ_t w_tj u_t v_tᵀ."""
        by_row = weights.repeat(1, self.calls, 1)
        scopes, _, columns = weights.shape
        k_out, k_in = self.u.shape[2], self.v.shape[2]
        total = self.u.new_zeros(scopes, columns * k_out, k_in)
        for rows in self._chunks(columns * k_out):
            weighted = (by_row[:, rows, :, None] * self.u[:, rows, None, :]).flatten(2)
            total.baddbmm_(weighted.transpose(1, 2), self.v[:, rows])
        return total.view(scopes, columns, k_out, k_in)

    def gram(self) -> Tensor:
        """[S, T, T]: g_t · g_s = (u_t · u_s)(v_t · v_s)."""
        gram = torch.bmm(self.u, self.u.transpose(1, 2)).mul_(torch.bmm(self.v, self.v.transpose(1, 2)))
        if self.calls == 1:
            return gram
        return gram.view(-1, self.calls, self.count, self.calls, self.count).sum((1, 3))

    def trace(self) -> Tensor:
        """[S]: Σ_t |g_t|²."""
        if self.calls == 1:
            return (self.u.square().sum(2) * self.v.square().sum(2)).sum(1)
        return self.explicit().square().sum((1, 2))

    def explicit(self) -> Tensor:
        """[S, T, D]: the gradients themselves."""
        return self._to_tokens(torch.einsum("sto,sti->stoi", self.u, self.v).flatten(2))

    def _chunks(self, width: int) -> Iterator[slice]:
        """Slices of the rows that keep an intermediate of this width within bounds."""
        step = max(1, CHUNK_ELEMENTS // max(1, width * len(self.u)))
        return (slice(start, start + step) for start in range(0, self.u.shape[1], step))

    def _to_tokens(self, rows: Tensor) -> Tensor:
        if self.calls == 1:
            return rows
        return rows.view(len(rows), self.calls, self.count, -1).sum(1)


class Curvature:
    """What all have in common; each says how H⁻¹ is applied."""

    name = ""

    def __init__(self, gradients: Tensor, tokens: TokenRows) -> None:
        self.gradients = gradients
        self.tokens = tokens

    def combine(self, weights: Tensor) -> Tensor:
        """q = W M: [S, m, k_out, k_in]."""
        scopes, _, k_out, k_in = self.gradients.shape
        return torch.matmul(weights, self.gradients.flatten(2)).view(scopes, -1, k_out, k_in)

    def mixing(self, weights: Tensor) -> Tensor | None:
        """[S, m, n]: the weights with which Z are combinations of the response gradients; None if they are not."""
        return None

    def directions(self, weights: Tensor) -> Tensor:
        return self.combine(weights)

    def token_scores(self, weights: Tensor) -> Tensor:
        mixing = self.mixing(weights)
        if mixing is None or mixing.shape[1] < self.gradients.shape[1]:
            return self.tokens.contract(self.directions(weights))
        # Scores of all responses are mixed rather than their gradients, which are so much larger.
        return torch.matmul(self.tokens.contract(self.gradients), mixing.mT)

    def kernel(self) -> Tensor:
        everything = torch.eye(self.gradients.shape[1]).to(self.gradients)
        mixing = self.mixing(everything.expand(len(self.gradients), -1, -1))
        if mixing is not None:
            return torch.matmul(products(self.gradients, self.gradients), mixing.mT)
        return products(self.gradients, self.directions(everything))

    def effective_dof(self) -> Tensor | None:
        """[S]: tr(K(K+λI)⁻¹) / n, the share of the n directions that λ leaves alone; None where there is no λ."""
        return None


class Identity(Curvature):
    """H = I."""

    name = "identity"

    def mixing(self, weights: Tensor) -> Tensor:
        return weights


class OptimizerGeometry(Curvature):
    """H⁻¹ = P, what the optimizer does to a gradient, element by element."""

    name = "optimizer"

    def __init__(self, gradients: Tensor, tokens: TokenRows, preconditioner: Tensor) -> None:
        """`preconditioner`: [S, k_out, k_in]."""
        super().__init__(gradients, tokens)
        self.preconditioner = preconditioner[:, None].to(gradients)

    def directions(self, weights: Tensor) -> Tensor:
        return self.combine(weights).mul_(self.preconditioner)


class ResponseCurvature(Curvature):
    """H = Σ_r M_r M_rᵀ + λI through the n×n matrix K_rs = ⟨M_r, M_s⟩; exact at any D."""

    name = "response"

    def __init__(self, gradients: Tensor, tokens: TokenRows, damping: Damping) -> None:
        super().__init__(gradients, tokens)
        self.gram = products(gradients, gradients)
        rows = torch.full((len(gradients),), float(gradients.shape[1]))
        # n×n, so float64 costs nothing and keeps λ = 0.1·tr/D visible beside the largest eigenvalue.
        system, self.damping = damped(self.gram.double(), damping, rows, gradients[0, 0].numel())
        inverse = torch.cholesky_inverse(torch.linalg.cholesky_ex(system)[0])
        self._left = self.damping * inverse.diagonal(dim1=1, dim2=2).sum(1) / gradients.shape[1]
        self.inverse = inverse.to(gradients.dtype)

    def mixing(self, weights: Tensor) -> Tensor:
        return torch.matmul(weights, self.inverse)

    def directions(self, weights: Tensor) -> Tensor:
        return self.combine(self.mixing(weights))

    def kernel(self) -> Tensor:
        return torch.bmm(self.gram, self.inverse)

    def effective_dof(self) -> Tensor:
        return 1.0 - self._left


class TokenGramCurvature(Curvature):
    """H = Σ_t g_t g_tᵀ + λI through the T×T Gram matrix of the tokens."""

    name = "gram"

    def __init__(self, gradients: Tensor, tokens: TokenRows, damping: Damping) -> None:
        super().__init__(gradients, tokens)
        system, self.damping = damped(tokens.gram(), damping, tokens.numbers(), gradients[0, 0].numel())
        self.factor = cholesky(system)
        self.cross = tokens.contract(gradients)  # [S, T, n]: g_t · M_r

    def token_scores(self, weights: Tensor) -> Tensor:
        return torch.cholesky_solve(torch.matmul(self.cross, weights.mT), self.factor)

    def directions(self, weights: Tensor) -> Tensor:
        removed = self.tokens.accumulate(self.token_scores(weights))
        return (self.combine(weights) - removed) / self.damping[:, None, None, None]

    def kernel(self) -> Tensor:
        explained = torch.bmm(self.cross.mT, torch.cholesky_solve(self.cross, self.factor))
        return (products(self.gradients, self.gradients) - explained) / self.damping[:, None, None]

    def effective_dof(self) -> Tensor | None:
        if self.tokens.count > MAX_DOF_SIZE:
            return None
        left = self.damping * torch.cholesky_inverse(self.factor).diagonal(dim1=1, dim2=2).sum(1)
        return (self.tokens.count - left) / self.tokens.numbers().to(left)


class DenseCurvature(Curvature):
    """H formed and factored: D×D. For small D, and to check the others."""

    name = "dense"

    def __init__(self, gradients: Tensor, tokens: TokenRows, damping: Damping, source: str, ranks: Ranks) -> None:
        super().__init__(gradients, tokens)
        if source == "response":
            rows, number = gradients.flatten(2), torch.full((len(gradients),), float(gradients.shape[1]))
            hessian = torch.bmm(rows.mT, rows)
        else:
            rows = tokens.explicit()
            hessian, number = ranks.sum(torch.bmm(rows.mT, rows)), ranks.sum(tokens.numbers())
        self.factor = cholesky(damped(hessian, damping, number, hessian.shape[-1])[0])

    def directions(self, weights: Tensor) -> Tensor:
        combined = self.combine(weights)
        return torch.cholesky_solve(combined.flatten(2).mT, self.factor).mT.reshape(combined.shape)


class TokenCGCurvature(Curvature):
    """H = Σ_t g_t g_tᵀ + λI by conjugate gradients. Over several ranks only D-sized vectors travel."""

    name = "cg"

    def __init__(self, gradients: Tensor, tokens: TokenRows, damping: Damping, ranks: Ranks) -> None:
        super().__init__(gradients, tokens)
        self.ranks = ranks
        trace, number = ranks.sum(tokens.trace()), ranks.sum(tokens.numbers())
        self.damping = damping.of(trace, number, gradients[0, 0].numel())[:, None, None, None]

    def _product(self, x: Tensor) -> Tensor:
        product = self.tokens.accumulate(self.tokens.contract(x))
        return self.ranks.sum(product).add_(x * self.damping)

    def directions(self, weights: Tensor) -> Tensor:
        return conjugate_gradients(self._product, self.combine(weights))


def products(a: Tensor, b: Tensor) -> Tensor:
    """[S, n, …], [S, m, …] → [S, n, m]: inner products."""
    return torch.bmm(a.flatten(2), b.flatten(2).mT)


def damped(matrix: Tensor, damping: Damping, rows: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """(matrix + λI, λ) of [S, k, k]; the trace of `matrix` is that of H, a sum of `rows` [S] products in D = `dim`."""
    diagonal = matrix.diagonal(dim1=1, dim2=2)
    chosen = damping.of(diagonal.sum(1), rows, dim)
    return matrix + torch.diag_embed(chosen[:, None].expand_as(diagonal)), chosen


def cholesky(matrix: Tensor) -> Tensor:
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if bool(failed.any()) and bool(torch.isfinite(matrix).all()):
        raise AttributionError(
            f"the regularised Hessian of size {matrix.shape[-1]} is not positive definite in {matrix.dtype}: raise"
            " reg_lambda (or leave it at 0 for the automatic value)"
        )
    return factor


def conjugate_gradients(product: Callable[[Tensor], Tensor], target: Tensor) -> Tensor:
    """Solves H X = target for all right-hand sides [S, m, …] at once, to about the working precision."""
    shape = target.shape
    residual = target.flatten(2).clone()
    solution = torch.zeros_like(residual)
    search = residual.clone()
    squared = residual.square().sum(2)
    tolerance = 1e-12 if target.dtype == torch.float64 else 1e-5
    goal = squared * tolerance**2
    for _ in range(CG_MAX_ITERATIONS):
        active = squared > goal
        if not bool(active.any()):
            break
        image = product(search.view(shape)).flatten(2)
        curvature = (search * image).sum(2)
        step = torch.where(active, squared / curvature.clamp(min=torch.finfo(target.dtype).tiny), 0.0)
        solution += step[..., None] * search
        residual -= step[..., None] * image
        renewed = residual.square().sum(2)
        search = residual + torch.where(active, renewed / squared, 0.0)[..., None] * search
        squared = renewed
    return solution.view(shape)


def cheapest_token_solver(tokens: int, k_out: int, k_in: int, columns: int, split: bool) -> str:
    """`gram`, `cg` or `dense` by estimated multiplications. Split over ranks, the Gram matrix is out of reach."""
    dim = k_out * k_in
    costs = {"cg": CG_EXPECTED_ITERATIONS * 2 * tokens * dim * columns}
    if dim <= MAX_DENSE_DIM:
        costs["dense"] = tokens * dim**2 + FACTORING * dim**3 // 3
    if not split and tokens <= MAX_GRAM_TOKENS:
        products = tokens**2 * (k_out + k_in + columns) + tokens * dim * columns
        costs["gram"] = products + FACTORING * tokens**3 // 3
    return min(costs, key=lambda name: costs[name])


def make_curvature(
    gradients: Tensor, tokens: TokenRows, *, source: str, solver: str, damping: Damping, ranks: Ranks
) -> Curvature:
    """H⁻¹ by the cheapest way, or by the one that `solver` names. `ranks` are those that the scopes are split over."""
    if source == "response" and solver != "dense":
        return ResponseCurvature(gradients, tokens, damping)
    if solver == "auto":
        _, columns, k_out, k_in = gradients.shape
        solver = cheapest_token_solver(tokens.count, k_out, k_in, columns, ranks.size > 1)
        # Ranks hold different numbers of tokens and must still agree.
        solver = ranks.gather(solver)[0]
    if solver == "dense":
        return DenseCurvature(gradients, tokens, damping, source, ranks)
    if solver == "gram":
        if ranks.size > 1:
            raise AttributionError(
                "solver='gram' needs all tokens of a group on one rank, and this group is split; use 'cg' or 'auto'"
            )
        return TokenGramCurvature(gradients, tokens, damping)
    return TokenCGCurvature(gradients, tokens, damping, ranks)
