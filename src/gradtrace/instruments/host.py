"""The contract between instruments and hosts: what an instrument asks of whoever holds the weights and runs the passes.

An instrument's mathematics is written once, over these protocols. The embedded loop and TRL implement them with a model
in this process; verl implements them on every rank of its engine, where weights and gradients are shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor

from gradtrace.attribution import AttributionError
from gradtrace.attribution.collectives import Ranks
from gradtrace.errors import GradtraceError

if TYPE_CHECKING:
    from gradtrace.instruments.entropy_probe.passes import TokenBatch

Gradient = dict[str, Tensor]
"""A gradient by parameter name; on several ranks every tensor is sharded as its parameter is."""
Rows = TypeVar("Rows", contravariant=True)
"""How a host describes some responses with the weight of every token in a loss Σ w_t ℓ_t."""


class Host(Protocol):
    """What every instrument may ask of a host."""

    ranks: Ranks
    """All ranks that share the weights and the batch: sums and inner products go over them."""


class TracinHost(Host, Protocol[Rows]):
    """What TracIn scores are made of (`instruments.tracin.scores`)."""

    def gradient(self, responses: Rows) -> tuple[Gradient, list[float]]:
        """The gradient of Σ w_t ℓ_t over the responses of all ranks, and what each of them adds to that sum, in any
        order."""

    def scores(self, responses: Rows, direction: Gradient) -> Tensor:
        """float64[b]: for each response on this rank, the product of the gradient of its own loss and `direction`."""

    def preconditioned(self, gradient: Gradient) -> Gradient:
        """The gradient as the optimizer would scale it before this step; the same one where scores are plain."""


class DerivativeHost(Host, Protocol):
    """What blame is made of (`instruments.blame.sharing`), and the entropy probe, too."""

    is_exact: bool
    """Whether derivatives have no step size: forward mode, and not differences."""

    def derivative(
        self, run: Callable[[], Tensor], direction: Mapping[str, Tensor], step: float = 1.0, rate: float | None = None
    ) -> Tensor:
        """d/dε run() at θ + ε·direction, for a function that runs the model; the weights do not change by a bit. Where
        it is not exact, `step` times the usual ε is taken, and `rate`, by which share of themselves values change per
        unit of ε, about, saves the passes that would find it out."""

    def padding_held(self) -> AbstractContextManager[Any]:
        """Inside, `derivative` leaves the padding token's embedding out, as backward passes do."""


class ProbeHost(DerivativeHost, Protocol):
    """What the entropy probe is made of (`instruments.entropy_probe.probe`). Its batches are this rank's sequences."""

    def still(self) -> AbstractContextManager[Any]:
        """Inside, passes are those of the policy that samples, without dropout, and training does not notice them."""

    def entropy_gradient(
        self, batch: TokenBatch, weights: Tensor, progress: Callable[[int, int], None] | None = None
    ) -> Gradient:
        """The gradient of Σ_k (H_k + w ℓ_k) over the tokens of all ranks, w being `weights[i]` of their sequence i."""


@contextmanager
def asked_by(setting: str) -> Iterator[None]:
    """What attribution refuses inside is told to the user as an error of this setting."""
    try:
        yield
    except AttributionError as error:
        raise GradtraceError(f"{setting}: {error}") from error
