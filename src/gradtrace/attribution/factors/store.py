"""What a module keeps of a response between its backward pass and `score()`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradtrace.attribution.config import InfluenceConfig
from gradtrace.attribution.factors.capture import Capture, Part
from gradtrace.attribution.factors.modules import Block, by_block
from gradtrace.attribution.factors.solvers import TokenRows


class Store:
    """What waits for the rest of its group, by module and response."""

    def __init__(self, blocks: list[Block], config: InfluenceConfig) -> None:
        self.blocks = blocks
        self.config = config
        self.targets: dict[Block, dict[int, Tensor]] = {block: {} for block in blocks}
        """Gradients of targets [k_out, k_in], without a sign."""
        self.tokens: dict[Block, dict[int, TokenFactors]] = {block: {} for block in blocks}

    def keep(
        self,
        blocks: Sequence[Block],
        capture: Capture,
        calls: Sequence[Part],
        factors: Mapping[int, float],
        target: bool,
        step: bool,
    ) -> None:
        """Of the responses in `factors`, which turn a captured gradient into a target's: this and their tokens'
        factors, in modules of one kind."""
        responses, some = list(factors), calls[0].u
        where = torch.device("cpu") if self.config.grad_offload_to_cpu else some.device
        if target and responses:
            gradients = scaled(capture.gradients(calls, responses), list(factors.values())).to(where)
            for block, own in by_block(blocks, gradients).items():
                self.targets[block] |= zip(responses, own, strict=True)
        if step:
            for response in responses:
                flat = capture.layout.tokens_of(response, self.config.max_tokens_per_response)[None]
                sides = (side[:, 0].to(where) for side in capture.tokens(calls, flat))
                for block, u, v in zip(blocks, *sides, strict=True):
                    self.tokens[block][response] = TokenFactors(u[..., : block.k_out], v[..., : block.k_in])

    def gradients(self, block: Block, members: list[int]) -> Tensor:
        """[len(members), k_out, k_in]; zero for those of other ranks, and where the module had no gradient."""
        gradients = self.empty(len(members), block)
        for index, response in enumerate(members):
            if response in self.targets[block]:
                gradients[index] = self.targets[block][response]
        return gradients

    def combined(self, weights: Mapping[int, Tensor]) -> dict[Block, Tensor]:
        """Per module [m, k_out, k_in]: Σ_r weights[r] · target gradient of r, for weights [m] each."""
        found = {}
        for block, targets in self.targets.items():
            parts = [w.to(targets[r])[:, None, None] * targets[r] for r, w in weights.items() if r in targets]
            if parts:
                found[block] = torch.stack(parts).sum(0)
        return found

    def empty(self, rows: int, block: Block) -> Tensor:
        """Zeros [rows, k_out, k_in] where scores are computed."""
        weight = self.blocks[0].sites[0].module.weight
        assert isinstance(weight, Tensor)
        on_host = self.config.grad_offload_to_cpu and not self.config.force_gpu_compute
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        device = torch.device("cpu") if on_host else weight.device
        return torch.zeros(rows, block.k_out, block.k_in, dtype=dtype, device=device)


def scaled(gradients: Tensor, factors: list[float]) -> Tensor:
    """Each of [.., n, k_out, k_in] times its factor."""
    return gradients * torch.tensor(factors, dtype=gradients.dtype, device=gradients.device)[:, None, None]


@dataclass(eq=False)
class TokenFactors:
    """Factors of one response's captured tokens in one module, waiting for the rest of its group."""

    u: Tensor
    """[P, T_r, k_out], for each of the module's P calls."""
    v: Tensor
    """[P, T_r, k_in]"""


def join(stored: list[list[tuple[TokenFactors | None, int]]], width: int, like: Tensor) -> TokenRows:
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
