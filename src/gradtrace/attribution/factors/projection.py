"""Random projection of the two sides of a layer's gradient: u ↦ P_out u, v ↦ P_in v."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor


def projected_dims(
    d_out: int, d_in: int, factor: int, max_vector_sum: int = 0, max_hessian_dim: int = 0
) -> tuple[int, int]:
    """(k_out, k_in): d // factor on each side, then the larger side shrinks until both caps hold.

    Factor 0 means no projection: the sides keep their size (and `InfluenceConfig` refuses caps). Factor 1 projects
    only as far as the caps ask.
    """
    if factor == 0:
        return d_out, d_in
    k_out, k_in = max(1, d_out // factor), max(1, d_in // factor)

    def too_big() -> bool:
        over_sum = max_vector_sum > 0 and k_out + k_in > max_vector_sum
        over_product = max_hessian_dim > 0 and k_out * k_in > max_hessian_dim
        return (over_sum or over_product) and max(k_out, k_in) > 1

    while too_big():
        if k_out >= k_in:
            k_out -= 1
        else:
            k_in -= 1
    return k_out, k_in


def rademacher(name: str, side: str, k: int, d: int, seed: int, dtype: torch.dtype) -> Tensor:
    """[k, d] of ±1/√k, the same on every machine and rank for the same module name, side and seed."""
    digest = hashlib.sha256(f"{seed}/{side}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    signs = torch.randint(0, 2, (k, d), generator=generator, dtype=torch.int8)
    return signs.to(dtype).mul_(2).sub_(1).div_(math.sqrt(k))
