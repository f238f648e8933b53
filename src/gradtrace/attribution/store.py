"""What a module keeps of a response between its backward pass and `score()`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradtrace.attribution.solvers import TokenRows


@dataclass(eq=False)
class StoredFactors:
    gradient: Tensor
    """[k_out, k_in]: the response's gradient, summed over all its positions."""
    u: Tensor
    """[rows, k_out]: of the captured tokens."""
    v: Tensor
    """[rows, k_in]"""
    token: Tensor | None
    """long[rows]: the token of each row; None means row = token."""

    @staticmethod
    def empty(gradients: Tensor) -> StoredFactors:
        """Of a module that received no gradient. `gradients` [n, k_out, k_in] gives sizes and type."""
        _, k_out, k_in = gradients.shape
        nowhere = torch.empty(0, dtype=torch.long)
        return StoredFactors(
            gradients[0], gradients.new_empty(0, k_out), gradients.new_empty(0, k_in), nowhere
        )


def join_rows(
    factors: list[tuple[Tensor, Tensor, Tensor | None]], counts: list[int], members: list[int], like: Tensor
) -> tuple[TokenRows, Tensor]:
    """Factors of several responses as one table, and the member index of each token.

    `counts` are the captured tokens of each response, `members` their indices in the scope.
    """
    owner = torch.repeat_interleave(
        torch.tensor(members, dtype=torch.long), torch.tensor(counts, dtype=torch.long)
    )
    if not factors:
        _, k_out, k_in = like.shape
        return TokenRows(like.new_empty(0, k_out), like.new_empty(0, k_in), 0), owner
    u = torch.cat([factor[0] for factor in factors])
    v = torch.cat([factor[1] for factor in factors])
    if all(token is None for _, _, token in factors):
        return TokenRows(u, v, sum(counts)), owner
    starts = torch.tensor([0, *counts]).cumsum(0).tolist()
    token = [
        start + (torch.arange(len(factor[0])) if factor[2] is None else factor[2])
        for start, factor in zip(starts, factors, strict=False)
    ]
    return TokenRows(u, v, sum(counts), torch.cat(token).to(u.device)), owner
