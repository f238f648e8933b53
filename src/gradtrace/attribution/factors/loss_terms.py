"""Loss-term credit: every token's own term, differentiated along the direction that its score is about.

The direction of a scope is X = P Σ_r c_r g_r, or H⁻¹ of that sum: a tensor of the shape of each weight. One pass in
forward mode per scope then replaces one backward pass per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from gradtrace.attribution.collectives import Ranks, gathered, is_sharded
from gradtrace.attribution.config import InfluenceConfig
from gradtrace.attribution.errors import AttributionError
from gradtrace.attribution.factors.layers import Block
from gradtrace.attribution.factors.scopes import Scope, ScopeBatch
from gradtrace.attribution.geometry import Geometry, Source
from gradtrace.attribution.tangent import SPREAD, Method, directional_derivative, faster_method

Terms = Callable[[list[int]], Tensor]
"""Responses → their tokens' own terms of the step, one after the other: [N]."""


@dataclass(frozen=True, eq=False)
class SharedTerms:
    """Terms by ranks that share the work, where weights are sharded: all of them call it with the same responses,
    whoever holds them, and each is given the terms of those that it holds."""

    run: Terms

    def __call__(self, responses: list[int]) -> Tensor:
        return self.run(responses)


@dataclass(frozen=True, eq=False)
class HowToScore:
    """What `score` was given for loss terms."""

    terms: Terms
    coming: Mapping[str, Tensor]
    """The gradient that the optimizer will be given next; may be empty."""
    method: Method | None = None


class LossTerms:
    def __init__(
        self, model: nn.Module, blocks: list[Block], config: InfluenceConfig, geometry: Geometry, ranks: Ranks
    ) -> None:
        self.model = model
        self.blocks = blocks
        self.config = config
        self.geometry = geometry
        self.ranks = ranks
        self.sources: set[Source] = set()

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """Looked up when they are needed: a walk through all modules takes a small model's trace some time."""
        return dict(self.model.named_parameters(remove_duplicate=False))

    @cached_property
    def sharded(self) -> bool:
        return is_sharded(self.model)

    def score(
        self,
        scopes: list[Scope],
        batches: list[ScopeBatch],
        owners: Mapping[int, int],
        lengths: Mapping[int, int],
        how: HowToScore,
    ) -> dict[int, Tensor]:
        """Response → [T_r], scope by scope in the same order on every rank. `lengths`: of this rank's responses;
        `owners`: the rank of each response."""
        found: dict[int, Tensor] = {}
        solved = {id(scope): (batch, index) for batch in batches for index, scope in enumerate(batch.scopes)}
        for scope in scopes:
            ranks = {owners.get(response) for response in scope.members}
            if None in ranks:
                continue
            batch, index = solved.get(id(scope), (None, 0))
            # All ranks of a split scope have the whole direction: in a sum over ranks one of them counts.
            counts = not self.sharded or self.ranks.place == min(rank for rank in ranks if rank is not None)
            parts = batch.directions if batch is not None and counts else {}
            directions = {block: part[index] for block, part in parts.items()}
            if self.sharded and self.ranks.size > 1:
                directions = self._shared(directions, scope)
            # Passes through shards are collective themselves.
            with nullcontext() if self.sharded else self.ranks.together():
                found |= self._of(scope, directions, lengths, how)
        for batch in batches:
            batch.directions.clear()
        return found

    def _shared(self, directions: dict[Block, Tensor], scope: Scope) -> dict[Block, Tensor]:
        """The sum over ranks of what each has of a scope's directions, module by module. Collective."""
        rows = len(scope.members) if self.config.exclude_self_response else 1
        return {
            block: self.ranks.sum(directions.get(block, block.zeros(rows, self.config)).contiguous())
            for block in self.blocks
        }

    def _of(
        self, scope: Scope, directions: dict[Block, Tensor], lengths: Mapping[int, int], how: HowToScore
    ) -> dict[int, Tensor]:
        """Response → [T_r], of the scope's responses that are on this rank."""
        scores: dict[int, Tensor] = {}
        for row in range(len(scope.members) if self.config.exclude_self_response else 1):
            members = [scope.members[row]] if self.config.exclude_self_response else scope.members
            local = [response for response in members if response in lengths]
            if not (local or self.sharded):
                continue
            direction, slope = self._weight_shaped({b: d[row] for b, d in directions.items()}, how.coming)
            rate = self._rate(slope, scope.contrast[row], [lengths.get(r, 0) for r in scope.members])
            if isinstance(how.terms, SharedTerms):
                values_of: Callable[[], Tensor] = partial(how.terms, members)
            else:
                values_of = self._in_rounds(local, how.terms) if self.sharded else partial(how.terms, local)
            ranks, method = self.ranks if self.sharded else None, how.method or faster_method(self.model)
            values = directional_derivative(self.model, values_of, direction, method, ranks=ranks, rate=rate)
            counts = [lengths[response] for response in local]
            if values.shape != (sum(counts),):
                raise AttributionError(
                    f"terms({local}) returned {list(values.shape)}; these responses have {sum(counts)} tokens, and it"
                    " must return one term for each, in order"
                )
            scores |= zip(local, values.split(counts), strict=True)
        return scores

    def _rate(self, slope: Tensor | None, contrast: Tensor, lengths: list[int]) -> Tensor | None:
        """By which share of themselves tokens' terms change along a direction, about, if the contrast of the responses
        changes by `slope`; `lengths` are those of the responses on this rank. None where nothing is known."""
        weight = float(contrast.abs().sum())
        if self.config.response_reduction == "sum":
            tokens = float(contrast.abs().cpu() @ torch.tensor(lengths, dtype=contrast.dtype))
            weight = sum(self.ranks.gather(tokens)) if self.sharded else tokens  # sharded ranks move together
        return SPREAD * slope / weight if slope is not None and weight else None

    def _weight_shaped(
        self, direction: dict[Block, Tensor], coming: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """By name of the parameter, sharded as it is, and in the geometry of the optimizer where that came not
        before; and how much the contrast of the scope's responses changes along it, None where that is not known."""
        found, slopes = {}, []
        for block, part in direction.items():
            name = block.parameter_name
            parameter: Tensor = self.parameters[name]
            tangent = block.weight_direction(part).to(parameter.dtype)
            if isinstance(parameter, DTensor):
                tangent = distribute_tensor(tangent, parameter.device_mesh, parameter.placements, src_data_rank=None)
            slope = part.square().sum()
            if self.applies_late(block):
                self.sources.add(self.geometry.source(parameter, coming.get(name)))
                denominator = self.geometry.denominator(parameter, coming.get(name))
                if denominator is not None:
                    gradient, tangent = tangent, tangent / denominator.to(tangent.dtype)
                    slope = gathered((gradient * tangent).sum())
            found[name] = tangent
            slopes.append(slope)
        known = slopes and self.config.hessian_mode != "inverse"
        return found, torch.stack(slopes).sum() if known else None

    def applies_late(self, block: Block) -> bool:
        """Whether the optimizer's geometry is applied to the finished direction, when the coming gradient is known,
        and not to the factors inside the backward pass."""
        exact = self.config.preconditioner_form != "factored" and not block.projected
        return self.config.hessian_mode == "optimizer" and self.geometry.adaptive and exact

    def _in_rounds(self, local: list[int], terms: Terms) -> Callable[[], Tensor]:
        """Every forward pass gathers weights from all ranks, so all make equally many, one response at a time."""
        rounds = max(self.ranks.gather(len(local)))

        def values() -> Tensor:
            found = []
            for place in range(rounds):
                part = terms(local[place : place + 1])
                if place < len(local):
                    found.append(part.double().cpu())
            return torch.cat(found, -1) if found else torch.empty(0, dtype=torch.float64)

        return values
