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
    """[P, T_r, k_out]: of the captured tokens, for each of the module's P calls."""
    v: Tensor
    """[P, T_r, k_in]"""


def join(stored: list[list[tuple[StoredFactors | None, int]]], width: int, like: Tensor) -> TokenRows:
    """Per scope the factors and token counts of its responses, as one table padded to `width` tokens.

    None stands for a response in whose pass the module received no gradient. `like` [.., k_out, k_in] gives
    sizes, type and device.
    """
    k_out, k_in = like.shape[-2:]
    present = [factors for scope in stored for factors, _ in scope if factors is not None]
    calls = max((len(factors.u) for factors in present), default=1)
    u = like.new_zeros(len(stored), calls, width, k_out)
    v = like.new_zeros(len(stored), calls, width, k_in)
    for index, scope in enumerate(stored):
        start = 0
        for factors, count in scope:
            if factors is not None:
                u[index, : len(factors.u), start : start + count] = factors.u
                v[index, : len(factors.v), start : start + count] = factors.v
            start += count
    return TokenRows(u.flatten(1, 2), v.flatten(1, 2), width)


def padded(lists: list[Tensor], width: int) -> Tensor:
    """long[S, width] from S lists of positions; −1 where there is none."""
    table = torch.full((len(lists), width), -1, dtype=torch.long)
    for row, values in enumerate(lists):
        table[row, : len(values)] = values
    return table
