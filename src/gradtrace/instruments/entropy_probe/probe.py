"""`EntropyProbe`: what the next update will do to entropy, measured as well as predicted, and which tokens do it.

```python
probe = EntropyProbe(model, optimizer, max_grad_norm=1.0)
update = probe.update(update_batch)             # Δθ of the optimizer's next step on U, from its actual state
predicted = probe.predict(evaluation_batch, update)
shares = probe.shares(predicted, evaluation_batch, update, update_batch)
measured = probe.measure(predicted, evaluation_batch, update, scale=1.0)
```

The batches are `TokenBatch`es. Nothing here leaves a trace: gradients do not go to `.grad`, the weights are moved
for measuring and put back bit by bit, no random numbers are drawn. Every entropy change is in nats per token of
E, positive = entropy rises.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradtrace.attribution.collectives import local
from gradtrace.attribution.update import ParameterUpdate, parameter_updates
from gradtrace.errors import GradtraceError
from gradtrace.instruments.entropy_probe.estimates import Measured, Prediction, Tokens
from gradtrace.instruments.entropy_probe.passes import TokenBatch, gradient_of
from gradtrace.instruments.steps import asked_by
from gradtrace.instruments.whole_model import WholeModel
from gradtrace.policy.padding_row import padding_row_counts
from gradtrace.terminal import Progress

if TYPE_CHECKING:
    from gradtrace.instruments.contract import Host


@dataclass(frozen=True, eq=False)
class Update:
    """One optimizer step on U that has not been taken."""

    gradient: dict[str, Tensor]
    """The gradient of the loss after clipping, which the optimizer sees."""
    direction: dict[str, Tensor]
    """Δθ: exactly what `optimizer.step()` would add."""
    clip_factor: float
    """What clipping multiplied the gradient by; 1 = it did not clip."""
    grad_norm: float
    """Norm of the gradient before clipping."""


@dataclass(frozen=True, eq=False)
class Shares:
    """Parts of the predicted change: tokens + momentum + decay = legacy (= the prediction, up to rounding).

    A response's share is what its gradient adds to Δθ with Adam's second moment held as it is after the whole batch. It
    is not what leaving the response out would do: that would change the second moment and the clipping, too.
    """

    tokens: Tensor
    """float64[N] of U: each token's own loss term."""
    responses: Tensor
    """float64[R] of U: their sums."""
    momentum: float
    """The share of earlier batches, through the first moment."""
    decay: float
    """The share of weight decay."""
    legacy: float
    """⟨X̄, Ȳ⟩: gradient of the score-function loss on E times the preconditioned update."""


class EntropyProbe:
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float | None = None,
        host: Any = None,
    ) -> None:
        """`max_grad_norm`: gradients are clipped to it as `clip_grad_norm_` does; None or 0 = not at all. `host`: who
        takes derivatives (`contract.Host`), where the model is not simply in this process."""
        self.model = model
        self.optimizer = optimizer
        self.max_grad_norm = max_grad_norm
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.host: Host | WholeModel = host or WholeModel(model)
        if not self.parameters:
            raise GradtraceError("every parameter of the model is frozen (requires_grad=False): no update can move it")
        for name, parameter in self.parameters.items():
            if parameter.dtype not in (torch.float32, torch.float64):
                raise GradtraceError(
                    f"parameter {name} is {parameter.dtype}: its rounding is larger than the entropy changes of an "
                    "update. Load the model in float32 or float64"
                )

    # ------------------------------------------------------------ the update

    def update(self, batch: TokenBatch, progress: Progress | None = None) -> Update:
        """Δθ of one optimizer step on `batch`, clipped as in training."""
        with self.host.aside():
            gradient = gradient_of(self.model, batch, lambda rows, terms: terms.sum(), progress)
        norm = self._norm(gradient)
        factor = min(1.0, self.max_grad_norm / (norm + 1e-6)) if self.max_grad_norm else 1.0  # as clip_grad_norm_
        return self.update_of({name: factor * value for name, value in gradient.items()}, factor, norm)

    def update_of(
        self, gradient: Mapping[str, Tensor], clip_factor: float = 1.0, grad_norm: float | None = None
    ) -> Update:
        """Δθ for a gradient that is there already and is clipped already (`clip_factor` says by how much)."""
        norm = self._norm(gradient) if grad_norm is None else grad_norm
        if not math.isfinite(norm):
            broken = [name for name, value in gradient.items() if not bool(local(value).isfinite().all())]
            where = f" of {broken[0]}" if broken else ""
            raise GradtraceError(f"the gradient{where} is not finite: the trainer would skip this update")
        direction = {name: part.whole(gradient[name]) for name, part in self._parts(gradient)}
        return Update(dict(gradient), direction, clip_factor, norm)

    def _norm(self, gradient: Mapping[str, Tensor]) -> float:
        return math.sqrt(sum(self.host.ranks.products(gradient, gradient).values()))

    def _parts(self, gradient: Mapping[str, Tensor]) -> Iterator[tuple[str, ParameterUpdate]]:
        # An optimizer may hold frozen parameters, too.
        with asked_by("entropy probe"):
            yield from parameter_updates(self.optimizer, dict(self.model.named_parameters()), gradient)

    # ------------------------------------------------------------ prediction

    def tokens(self, batch: TokenBatch, progress: Progress | None = None) -> Tokens:
        """E at the current weights."""
        with self.host.aside(), torch.no_grad():
            log_probs, entropies = batch.collect(lambda one: one.run(), progress)
        return Tokens(batch.lengths, batch.group, log_probs, entropies)

    def predict(
        self,
        batch: TokenBatch,
        update: Update,
        base: Tokens | None = None,
        progress: Progress | None = None,
    ) -> Prediction:
        """The change of every E token to first order, along the update that the optimizer is about to make."""
        base = base or self.tokens(batch)
        with self.host.aside():
            d_log_probs, d_entropies = batch.collect(
                lambda one: self.host.derivative(one.run, update.direction), progress
            )
        return Prediction(base, d_log_probs, d_entropies)

    def shares(
        self,
        prediction: Prediction,
        evaluation: TokenBatch,
        update: Update,
        batch: TokenBatch,
        progress: Progress | None = None,
    ) -> Shares:
        """Attribute the change, by one backward pass over E and one derivative over U, however many responses there
        are."""
        ranks = self.host.ranks
        with self.host.aside():
            target = self._entropy_gradient(prediction.base, evaluation, progress)
            direction: dict[str, Tensor] = {}
            sums = [0.0, 0.0, 0.0]
            for name, part in self._parts(update.gradient):
                if name not in target:
                    continue
                direction[name] = -update.clip_factor * part.factor * target[name]
                for place, of in enumerate((part.momentum, part.decay, part.whole(update.gradient[name]))):
                    sums[place] += ranks.own_part(target[name], torch.as_tensor(of))
            momentum, decay, legacy = (sum(column) for column in zip(*ranks.gather(sums), strict=True))
            del target
            with self.host.padding_held():
                tokens = batch.collect(lambda one: self.host.derivative(one.run, direction))
        owner = torch.arange(len(batch.lengths)).repeat_interleave(batch.lengths)
        responses = torch.zeros(len(batch.lengths), dtype=torch.float64).index_add_(0, owner, tokens)
        return Shares(tokens, responses, momentum, decay, legacy)

    def _entropy_gradient(self, base: Tokens, batch: TokenBatch, progress: Progress | None = None) -> dict[str, Tensor]:
        """X̄ = ∇[Σ H_k + Σ (h_i − H̄T_i) ℓ_k] / ΣT over all of E, the weights held fixed."""
        own = float(base.entropies.sum()), int(base.lengths.sum())
        entropy, count = (sum(column) for column in zip(*self.host.ranks.gather(own), strict=True))
        weights = base.sums["h"] - entropy / count * base.sums["T"]

        def objective(rows: Tensor, values: Tensor) -> Tensor:
            log_probs, entropies = values
            own = weights[rows].repeat_interleave(batch.lengths[rows]).to(values)
            return (entropies + own * log_probs).sum()

        with padding_row_counts(self.model):
            if batch.gradient is not None:
                gradient = dict(batch.gradient(weights))
            else:
                gradient = gradient_of(self.model, batch, objective, progress)
        return {name: value.div_(count) for name, value in gradient.items()}

    # ------------------------------------------------------------ measurement

    def measure(
        self,
        prediction: Prediction,
        batch: TokenBatch,
        update: Update,
        scale: float = 1.0,
        progress: Progress | None = None,
    ) -> tuple[Measured, Tokens]:
        """E at θ + scale·Δθ, reweighted; and its tokens there."""
        with self.moved(update, scale):
            after = self.tokens(batch, progress)
        return prediction.against(after, scale), after

    def moved(self, update: Update, scale: float) -> AbstractContextManager[None]:
        """Inside, the model is at θ + scale·Δθ; afterwards it is where it was, bit by bit."""
        return self.host.moved(update.direction, scale)
