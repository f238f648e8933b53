"""Loss-term credit where parameters are sharded over ranks: central differences on the shards.

A token's own term is differentiated along the direction X that its scope's scores are about. All ranks hold a part of
every weight, so they move to θ ± εX together, and all of them run each forward pass. Only X travels, projected:
[k_out, k_in] per layer, from a rank that has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from gradtrace.attribution import AttributionError, InfluenceTracer
from gradtrace.attribution.loss_terms import Terms
from gradtrace.attribution.tangent import Method, Shards

RoundTerms = Callable[[int | None], Tensor]
"""A response of this rank, or None for a pass that only keeps the other ranks company → its tokens' own terms."""


class ShardedTracer(InfluenceTracer):
    round_terms: RoundTerms | None = None
    """Set by the engine: one forward pass, on every rank at once."""

    def _loss_terms(self, terms: Terms, method: Method) -> dict[int, Tensor]:
        found = {
            id(scope): (batch, index) for batch in self._batches for index, scope in enumerate(batch.scopes)
        }
        mine = [number for number, scope in enumerate(self._scopes) if id(scope) in found]
        owners = {
            number: rank
            for rank, numbers in reversed(list(enumerate(self.ranks.gather(mine))))
            for number in numbers
        }
        scores: dict[int, Tensor] = {}
        for number in sorted(owners):
            scope = self._scopes[number]
            batch, index = found.get(id(scope), (None, 0))
            directions = None
            if batch is not None:
                directions = {block: part[index] for block, part in batch.directions.items()}
            rows = len(scope.members) if self.config.exclude_self_response else 1
            shared = self._share(directions, rows, owners[number])
            for row in range(rows):
                members = [scope.members[row]] if self.config.exclude_self_response else scope.members
                scores |= self._along({block: part[row] for block, part in shared.items()}, members)
        for batch in self._batches:
            batch.directions.clear()
        return scores

    def _share(self, directions: dict[Any, Tensor] | None, rows: int, owner: int) -> dict[Any, Tensor]:
        """The directions of a scope, per layer [rows, k_out, k_in], on every rank."""
        weight: Any = self.blocks[0].sites[0].module.weight
        shared = {}
        for block in self.blocks:
            empty = torch.zeros(rows, block.k_out, block.k_in, device=weight.device)
            part = empty if directions is None or block not in directions else directions[block].to(empty)
            part = part.contiguous()
            if self.ranks.size > 1:
                assert self.ranks.group is not None
                dist.broadcast(part, dist.get_global_rank(self.ranks.group, owner), group=self.ranks.group)
                self.ranks.bytes_moved += part.numel() * part.element_size()
            shared[block] = part
        return shared

    def _along(self, direction: dict[Any, Tensor], members: list[int]) -> dict[int, Tensor]:
        """Response → d/dε of its terms at θ + ε·direction, for those of `members` that are on this rank."""
        assert self.round_terms is not None
        local = [response for response in members if response in self._token_counts]
        rounds = max(self.ranks.gather(len(local)))
        shards = Shards(self.model, self._parts(direction), self.ranks)
        if shards.length == 0.0:
            return {response: torch.zeros(self._token_counts[response]) for response in local}

        def terms() -> Tensor:
            parts = []
            for place in range(rounds):
                response = local[place] if place < len(local) else None
                values = self.round_terms(response)  # type: ignore[misc]
                if response is not None:
                    parts.append(values.double().cpu())
            return torch.cat([torch.empty(0, dtype=torch.float64), *parts])

        values = shards.derivative(terms).float()
        counts = [self._token_counts[response] for response in local]
        if len(values) != sum(counts):
            raise AttributionError(
                f"the responses {local} have {sum(counts)} tokens, and {len(values)} terms"
            )
        return dict(zip(local, values.split(counts), strict=True))

    def _parts(self, direction: dict[Any, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Every weight, and its part of a direction that is given per layer, projected; sharded alike."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        parts = []
        for block, part in direction.items():
            parameter: Any = parameters[block.parameter_name]
            own = block.weight_direction(part).to(parameter.dtype)
            if isinstance(parameter, DTensor):
                own = distribute_tensor(own, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parts.append((parameter, own))
        return parts
