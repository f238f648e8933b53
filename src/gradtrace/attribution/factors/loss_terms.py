"""Loss-term credit: every token's own term, differentiated along the direction that its score is about.

The direction of a scope is X = P Σ_r c_r g_r, a tensor of the shape of each weight: one sum that grows with every
backward pass, whatever part of the scope the pass holds. One forward-mode pass per scope then replaces one backward
pass per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from gradtrace.attribution.collectives import Ranks, gathered, is_sharded
from gradtrace.attribution.config import InfluenceConfig
from gradtrace.attribution.errors import AttributionError
from gradtrace.attribution.factors.labels import Labels
from gradtrace.attribution.factors.modules import Block, by_block
from gradtrace.attribution.factors.scopes import Scope, ScopeBatch
from gradtrace.attribution.factors.store import Store
from gradtrace.attribution.geometry import Geometry, Source
from gradtrace.attribution.tangent import SPREAD, Method, directional_derivative

Terms = Callable[[list[int]], Tensor]
"""Responses → their tokens' own terms of the step, one after the other: [N], or [2, N] with their log-probs below."""


@dataclass(frozen=True, eq=False)
class SharedTerms:
    """Terms by ranks that share the work, where weights are sharded: all of them call it with the same responses,
    whoever holds them, and each is given the terms of those that it holds."""

    run: Terms

    def __call__(self, responses: list[int]) -> Tensor:
        return self.run(responses)


Directions = dict[Block, Tensor]
"""Per module [m, k_out, k_in]: one direction for all tokens of a scope, or one for each of its members' tokens."""


class LossTerms:
    def __init__(self, model: nn.Module, config: InfluenceConfig, geometry: Geometry, ranks: Ranks) -> None:
        self.model = model
        self.config = config
        self.geometry = geometry
        self.ranks = ranks
        self.sums: dict[int, Directions] = {}
        """By id of a scope: this rank's part of Σ_r c_r g_r. Not used by `inverse`, which is not linear in g."""
        self._pending: dict[int, Directions] = {}
        self.sources: set[Source] = set()

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """Looked up when they are needed: a walk through all modules takes a small model's trace some time."""
        return dict(self.model.named_parameters(remove_duplicate=False))

    @cached_property
    def sharded(self) -> bool:
        return is_sharded(self.model)

    def weights(self, scope: Scope, factors: Mapping[int, float]) -> dict[int, Tensor]:
        """Member → [m]: how its gradient counts in the scope's directions; `factors` turn a gradient into a
        target's."""
        rows = scope.contrast if self.config.exclude_self_response else scope.contrast[:1]
        return {r: rows[:, i] * factors[r] for i, r in enumerate(scope.members) if r in factors}

    def add(self, scope: Scope, blocks: Sequence[Block], parts: Tensor) -> None:
        """What the members that a pass holds bring to the directions of some modules: [M, m, k_out, k_in]."""
        self._pending.setdefault(id(scope), {}).update(by_block(blocks, parts))

    def commit(self) -> None:
        """The backward pass went well: what it brought counts."""
        for scope, parts in self._pending.items():
            sums = self.sums.setdefault(scope, {})
            for block, part in parts.items():
                sums[block] = part if block not in sums else sums[block].add_(part)
        self._pending = {}

    def forget_pass(self) -> None:
        """Drop what a backward pass brought that did not come to its end."""
        self._pending = {}

    def score(
        self,
        scopes: list[Scope],
        batches: list[ScopeBatch],
        owners: Mapping[int, int],
        lengths: Mapping[int, int],
        store: Store,
        labels: Labels,
        terms: Terms,
        method: Method,
        coming: Mapping[str, Tensor],
    ) -> dict[int, Tensor]:
        """Response → [1 or 2, T_r], scope by scope in the same order on every rank."""
        found: dict[int, Tensor] = {}
        solved = {id(s): (b, i) for b in batches for i, s in enumerate(b.scopes)}
        linear = self.config.hessian_mode != "inverse"
        for scope in scopes:
            ranks = {owners.get(response) for response in scope.members}
            if not scope.has_loss_terms or None in ranks:
                continue
            if linear:
                directions = self.sums.pop(id(scope), None)
                if directions is None:  # labels were not known at capture
                    signs = {r: labels.sign_of(r) for r in scope.members if r in lengths}
                    directions = store.combined(self.weights(scope, signs))
            else:
                batch, index = solved.get(id(scope), (None, 0))
                # All ranks of a split scope have the whole direction: in a sum over ranks one of them counts.
                counts = not self.sharded or self.ranks.place == min(rank for rank in ranks if rank is not None)
                parts = batch.directions if batch is not None and counts else {}
                directions = {block: part[index] for block, part in parts.items()}
            if self.ranks.size > 1 and (self.sharded or (linear and len(ranks) > 1)):
                directions = self._shared(directions, scope, store)
            # Passes through shards are collective themselves.
            with nullcontext() if self.sharded else self.ranks.together():
                found |= self._of(scope, directions, lengths, terms, method, coming)
        for batch in batches:
            batch.directions.clear()
        return found

    def _shared(self, directions: Directions, scope: Scope, store: Store) -> Directions:
        """The sum over ranks of what each has of a scope's directions, module by module. Collective."""
        rows = len(scope.members) if self.config.exclude_self_response else 1
        return {
            block: self.ranks.sum(directions.get(block, store.empty(rows, block)).contiguous())
            for block in store.blocks
        }

    def _of(
        self,
        scope: Scope,
        directions: Directions,
        lengths: Mapping[int, int],
        terms: Terms,
        method: Method,
        coming: Mapping[str, Tensor],
    ) -> dict[int, Tensor]:
        """Response → [1 or 2, T_r], of the scope's responses with loss terms that are on this rank."""
        wanted = scope.loss_term_members
        rows = len(scope.members) if self.config.exclude_self_response else 1
        scores: dict[int, Tensor] = {}
        for row in range(rows):
            members = [scope.members[row]] if self.config.exclude_self_response else wanted
            members = [response for response in members if response in wanted]
            local = [response for response in members if response in lengths]
            if not members or not (local or self.sharded):
                continue
            direction, slope = self._weight_shaped({b: d[row] for b, d in directions.items()}, coming)
            rate = self._rate(slope, scope.contrast[row], [lengths.get(r, 0) for r in scope.members])
            if isinstance(terms, SharedTerms):
                values_of: Callable[[], Tensor] = partial(terms, members)
            else:
                values_of = self._in_rounds(local, terms) if self.sharded else partial(terms, local)
            scores |= self._along(direction, local, lengths, values_of, method, rate)
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
        self, direction: Directions, coming: Mapping[str, Tensor]
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

    def _along(
        self,
        direction: dict[str, Tensor],
        local: list[int],
        lengths: Mapping[int, int],
        values_of: Callable[[], Tensor],
        method: Method,
        rate: Tensor | None,
    ) -> dict[int, Tensor]:
        ranks = self.ranks if self.sharded else None
        values = directional_derivative(self.model, values_of, direction, method, ranks=ranks, rate=rate)
        counts = [lengths[response] for response in local]
        if values.dim() not in (1, 2) or values.shape[-1] != sum(counts):
            raise AttributionError(
                f"terms({local}) returned {list(values.shape)}; these responses have {sum(counts)} tokens, and it must"
                " return one term for each, in order: [N], or [2, N] with their log-probs below"
            )
        return dict(zip(local, torch.atleast_2d(values).split(counts, 1), strict=True))

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
