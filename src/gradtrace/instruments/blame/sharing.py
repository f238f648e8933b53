"""One optimizer step's ‖g‖², shared out to the tokens of this process; written once, for every host.

A token's share is ⟨∇L_t, g⟩/‖g‖²: the derivative of its own term of the loss along the whole gradient. The host says
how a derivative is taken: forward mode where the model is in one process, small steps on shards where it is not.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from gradtrace.attribution.collectives import Ranks
from gradtrace.attribution.errors import AttributionError
from gradtrace.attribution.tangent import SPREAD
from gradtrace.attribution.update import parameter_updates, update_rule
from gradtrace.instruments.contract import Host

WINDOW, ENOUGH = 40, 8
"""Optimizer steps whose norms say what is usual, and how many of them it takes."""
MISSED = 0.005
"""By how much the shares may miss 1 before differences with other steps are tried, a shorter and a longer one."""
OTHER_STEPS = (1 / 8, 8.0)


class UsualNorms:
    """Norms of the last optimizer steps. All ranks see the same ones, so that they agree about what is unusual."""

    def __init__(self, unusual_ratio: float) -> None:
        self.ratio = unusual_ratio
        self._norms: deque[float] = deque(maxlen=WINDOW)

    def is_unusual(self, norm: float) -> bool:
        """Whether this one, which is remembered, is so many times the median of those before it."""
        known = list(self._norms)
        self._norms.append(norm)
        return self.ratio > 0 and len(known) >= ENOUGH and norm > self.ratio * median(known)


@dataclass(frozen=True, eq=False)
class Sharing:
    host: Host
    model: nn.Module
    optimizer: torch.optim.Optimizer
    measured: list[str]
    """The weights whose part of every response's gradient is measured (`ResponseGradients`)."""

    def norm(self, gradient: Mapping[str, Tensor], clip_factor: float) -> float:
        """‖g‖ before clipping, of the `gradient` that the optimizer is given."""
        length = math.sqrt(sum(self.host.ranks.products(gradient, gradient).values()))
        return length / clip_factor if clip_factor else math.inf

    def share_out(
        self,
        terms: Callable[[], Tensor],
        gradient: Mapping[str, Tensor],
        clip_factor: float,
        number: int,
        weight: float | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """float64[3, N]: of each token of this process its share of ‖g‖² of all ranks, its push −⟨∇ℓ_t, g⟩, and its
        log-prob at the weights before the step; and what the file's meta says of the step, the same on all ranks.

        `terms` runs the model: [2, N], every token's own term of the whole loss and its log-prob. `gradient` is
        what the optimizer is about to be given, `clip_factor` what clipping has multiplied it by. `weight`, of a host
        that takes differences: Σ_t |c_t| of all ranks where the loss is about Σ_t c_t ℓ_t; it says how long a step must
        be."""
        ranks, values = self.host.ranks, []

        def run() -> Tensor:
            made = terms()
            values.append(forward_ad.unpack_dual(made).primal[1].double().cpu())
            return made

        squares = ranks.products(gradient, gradient)
        square = sum(squares.values())
        with self.host.padding_held():
            changes, residual = self._changes(run, gradient, square / clip_factor, weight)
        share = changes[0] / square * clip_factor
        update = {
            "number": number,
            "grad_norm": square**0.5 / clip_factor,
            "clip_factor": clip_factor,
            "residual": residual,
            "norm_coverage": sum(squares.get(name, 0.0) for name in self.measured) / square,
            **move_parts(self.optimizer, dict(self.model.named_parameters()), gradient, ranks),
        }
        # Small steps go as far forth as back: their mean is the value in between.
        return torch.stack([share, -changes[1] / clip_factor, torch.stack(values).mean(0)]), update

    def _changes(
        self, run: Callable[[], Tensor], gradient: Mapping[str, Tensor], square: float, weight: float | None
    ) -> tuple[Tensor, float]:
        """float64[2, N]: the derivatives of `run` along the gradient, and by how much those of the losses, in units of
        `square`, miss 1 over all ranks.

        What they sum to is known, so differences check themselves: a loss that bends, or a token beside the edge of
        its clip range, shows, and the step with the smallest miss is taken."""

        rate = SPREAD * square / weight if weight else None

        def attempt(step: float) -> tuple[Tensor, float]:
            changes = self.host.derivative(run, gradient, step, rate).double().cpu()
            return changes, 1.0 - sum(self.host.ranks.gather(float(changes[0].sum()) / square))

        best = attempt(1.0)
        for step in () if self.host.is_exact else OTHER_STEPS:
            if abs(best[1]) > MISSED:
                best = min(best, attempt(step), key=lambda made: abs(made[1]))
        return best


def move_parts(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    gradient: Mapping[str, Tensor],
    ranks: Ranks,
) -> dict[str, float]:
    """What the optimizer's move Δθ is made of: ⟨part, Δθ⟩/‖Δθ‖² of this batch, of momentum and of weight decay. Empty
    where the optimizer's rule is not known."""
    names = ("from_batch", "from_momentum", "from_decay")
    sums = [0.0, 0.0, 0.0]
    try:
        update_rule(optimizer)
    except AttributionError:
        return {}
    for name, part in parameter_updates(optimizer, parameters, gradient):
        whole = part.whole(gradient[name])
        for place, of in enumerate((-part.factor * gradient[name], part.momentum, part.decay)):
            sums[place] += ranks.own_part(whole, torch.as_tensor(of))
    sums = [sum(column) for column in zip(*ranks.gather(sums), strict=True)]
    total = sum(sums)
    return {name: value / total if total else 0.0 for name, value in zip(names, sums, strict=True)}
