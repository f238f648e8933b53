"""The contract between instruments and hosts: what an instrument asks of whoever holds the weights and runs the passes.

An instrument's mathematics is written once, over these protocols. The embedded loop and TRL implement them with a model
in this process; verl implements them on every rank of its engine, where weights and gradients are shards.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor

from gradtrace.attribution.collectives import Ranks

Gradient = dict[str, Tensor]
"""By parameter name; on several ranks every tensor is sharded as its parameter is."""
Rows = TypeVar("Rows", contravariant=True)
"""How a host describes some responses with the weight of every token in a loss Σ w_t ℓ_t."""


class Host(Protocol):
    """What every instrument may ask."""

    ranks: Ranks
    """All ranks that share the weights and the batch: sums and inner products go over them."""


class TracinHost(Host, Protocol[Rows]):
    """What TracIn scores are made of (`instruments.tracin.scores`)."""

    def gradient(self, responses: Rows) -> tuple[Gradient, float]:
        """The gradient of Σ w_t ℓ_t over the responses of all ranks, and the value of that sum."""

    def scores(self, responses: Rows, direction: Gradient) -> Tensor:
        """float64[b]: for each response on this rank, the product of the gradient of its own loss and `direction`."""

    def preconditioned(self, gradient: Gradient) -> Gradient:
        """The gradient as the optimizer would scale it before this step; the same one where scores are plain."""
