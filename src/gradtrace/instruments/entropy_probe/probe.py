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

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradtrace.attribution import directional_derivative
from gradtrace.errors import GradtraceError
from gradtrace.instruments.entropy_probe.estimates import (
    Estimate,
    Measured,
    Tokens,
    measured_change,
    predicted_change,
    reward_to_go_change,
    score_function_change,
    score_weights,
)
from gradtrace.instruments.entropy_probe.padding_row import padding_row_counts, padding_row_is_constant
from gradtrace.instruments.entropy_probe.passes import TokenBatch
from gradtrace.instruments.entropy_probe.update_direction import parameter_updates
from gradtrace.rollout.sampler import evaluation_mode

Progress = Callable[[int, int], None]
"""(sequences done, sequences in all)."""


@dataclass(frozen=True, eq=False)
class Update:
    """One optimizer step on U that has not been taken."""

    gradient: dict[str, Tensor]
    """Of the loss, after clipping; what the optimizer sees."""
    direction: dict[str, Tensor]
    """Δθ: exactly what `optimizer.step()` would add."""
    clip_factor: float
    """What clipping multiplied the gradient by; 1 = it did not clip."""
    grad_norm: float
    """Before clipping."""


@dataclass(frozen=True, eq=False)
class Prediction:
    base: Tokens
    """E at the weights as they are."""
    d_log_probs: Tensor
    """float64[N]: change of each E token's log-prob to first order, for the whole update."""
    d_entropies: Tensor
    """float64[N]: change of the entropy at each E token to first order."""

    @property
    def change(self) -> Estimate:
        """δH1, the predicted change of the mean entropy."""
        return predicted_change(self.base, self.d_log_probs, self.d_entropies)

    @property
    def reward_to_go(self) -> Estimate:
        return reward_to_go_change(self.base, self.d_log_probs, self.d_entropies)

    @property
    def score_function(self) -> Estimate:
        return score_function_change(self.base, self.d_log_probs)


@dataclass(frozen=True, eq=False)
class Shares:
    """Of the predicted change: tokens + momentum + decay = legacy (= the prediction, up to rounding).

    A response's share is what its gradient adds to Δθ with Adam's second moment held as it is after the whole batch. It
    is not what leaving the response out would do: that would change the second moment and the clipping, too.
    """

    tokens: Tensor
    """float64[N] of U: each token's own loss term."""
    responses: Tensor
    """float64[R] of U: their sums."""
    momentum: float
    """By earlier batches, through the first moment."""
    decay: float
    """By weight decay."""
    legacy: float
    """⟨X̄, Ȳ⟩: gradient of the score-function loss on E times the preconditioned update."""


class EntropyProbe:
    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, max_grad_norm: float | None = None
    ) -> None:
        """`max_grad_norm`: gradients are clipped to it as `clip_grad_norm_` does; None or 0 = not at all."""
        self.model = model
        self.optimizer = optimizer
        self.max_grad_norm = max_grad_norm or None
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise GradtraceError(
                "every parameter of the model is frozen (requires_grad=False): no update can move it"
            )
        for name, parameter in self.parameters.items():
            if parameter.dtype not in (torch.float32, torch.float64):
                raise GradtraceError(
                    f"parameter {name} is {parameter.dtype}: its rounding is larger than the entropy changes of an "
                    "update. Load the model in float32 or float64"
                )

    # ------------------------------------------------------------ the update

    def update(self, batch: TokenBatch, progress: Progress | None = None) -> Update:
        """Δθ of one optimizer step on `batch`, clipped as in training."""
        with evaluation_mode(self.model):
            gradient = self._gradient(batch, lambda rows, terms: terms.sum(), progress)
        norm = _norm(gradient)
        factor = 1.0
        if self.max_grad_norm is not None:
            factor = min(1.0, self.max_grad_norm / (norm + 1e-6))  # as clip_grad_norm_
            gradient = {name: factor * value for name, value in gradient.items()}
        return self.update_of(gradient, factor, norm)

    def update_of(
        self, gradient: Mapping[str, Tensor], clip_factor: float = 1.0, grad_norm: float | None = None
    ) -> Update:
        """Δθ for a gradient that is there already and is clipped already (`clip_factor` says by how much)."""
        gradient = dict(gradient)
        for name, value in gradient.items():
            if not bool(value.isfinite().all()):
                raise GradtraceError(
                    f"the gradient of {name} is not finite: the trainer would skip this update"
                )
        direction = {
            name: part.whole(gradient[name])
            for name, part in parameter_updates(self.optimizer, self.parameters, gradient)
        }
        return Update(gradient, direction, clip_factor, _norm(gradient) if grad_norm is None else grad_norm)

    # ------------------------------------------------------------ prediction

    def tokens(self, batch: TokenBatch, progress: Progress | None = None) -> Tokens:
        """E at the current weights."""
        with evaluation_mode(self.model), torch.no_grad():
            log_probs, entropies = batch.collect(lambda one: one.run(), progress)
        return Tokens(batch.lengths, batch.group, log_probs, entropies)

    def predict(
        self,
        batch: TokenBatch,
        update: Update,
        base: Tokens | None = None,
        progress: Progress | None = None,
    ) -> Prediction:
        """The change of every E token to first order, by forward mode: no step size to choose, nothing cancels."""
        base = base or self.tokens(batch)
        with evaluation_mode(self.model):
            d_log_probs, d_entropies = batch.collect(
                lambda one: directional_derivative(self.model, one.run, update.direction), progress
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
        """Who does it: one backward pass over E and one forward-mode pass over U, however many responses there are."""
        with evaluation_mode(self.model):
            target = self._entropy_gradient(prediction.base, evaluation, progress)
            direction: dict[str, Tensor] = {}
            momentum = decay = legacy = 0.0
            for name, part in parameter_updates(self.optimizer, self.parameters, update.gradient):
                if name not in target:
                    continue
                direction[name] = -update.clip_factor * part.factor * target[name]
                momentum += _product(target[name], part.momentum)
                decay += _product(target[name], part.decay)
                legacy += _product(target[name], update.direction[name])
            with padding_row_is_constant(self.model):
                tokens = batch.collect(lambda one: directional_derivative(self.model, one.run, direction))
        owner = torch.arange(len(batch.lengths)).repeat_interleave(batch.lengths)
        responses = torch.zeros(len(batch.lengths), dtype=torch.float64).index_add_(0, owner, tokens)
        return Shares(tokens, responses, momentum, decay, legacy)

    def _entropy_gradient(
        self, base: Tokens, batch: TokenBatch, progress: Progress | None
    ) -> dict[str, Tensor]:
        """X̄ = ∇[Σ H_k + Σ (h_i − H̄T_i) ℓ_k] / ΣT, the weights held fixed."""
        weights, total = score_weights(base), float(base.lengths.sum())

        def surrogate(rows: Tensor, values: Tensor) -> Tensor:
            log_probs, entropies = values
            own = weights[rows].repeat_interleave(base.lengths[rows]).to(log_probs)
            return (entropies + own * log_probs).sum() / total

        with padding_row_counts(self.model):
            return self._gradient(batch, surrogate, progress)

    def _gradient(
        self,
        batch: TokenBatch,
        objective: Callable[[Tensor, Tensor], Tensor],
        progress: Progress | None = None,
    ) -> dict[str, Tensor]:
        """Of `objective(rows, values)` summed over the passes; parameters that it does not reach are left out."""
        found: dict[str, Tensor] = {}
        names, parameters = list(self.parameters), list(self.parameters.values())
        done = 0
        for one in batch.passes():
            with torch.enable_grad():
                value = objective(one.rows, one.run())
            if not value.requires_grad:
                raise GradtraceError(
                    "the loss does not depend on any trainable parameter: is the model run under no_grad, or are its "
                    "outputs detached?"
                )
            for name, gradient in zip(
                names, torch.autograd.grad(value, parameters, allow_unused=True), strict=True
            ):
                if gradient is not None:
                    found[name] = found[name].add_(gradient) if name in found else gradient.clone()
            done += len(one.rows)
            if progress is not None:
                progress(done, len(batch.lengths))
        if not found:
            raise GradtraceError("the loss does not reach any of the model's trainable parameters")
        return found

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
        return self.compare(prediction, after, scale), after

    def compare(self, prediction: Prediction, after: Tokens, scale: float = 1.0) -> Measured:
        """The measured change, from E's tokens at weights that have moved by `scale` updates."""
        return measured_change(prediction.base, after, prediction.d_log_probs, prediction.d_entropies, scale)

    @contextlib.contextmanager
    def moved(self, update: Update, scale: float) -> Iterator[None]:
        """Inside, the model is at θ + scale·Δθ; afterwards it is where it was, bit by bit."""
        saved = {name: self.parameters[name].detach().clone() for name in update.direction}
        try:
            with torch.no_grad():
                for name, step in update.direction.items():
                    self.parameters[name].add_(step, alpha=scale)
            yield
        finally:
            with torch.no_grad():
                for name, value in saved.items():
                    self.parameters[name].copy_(value)


def _norm(gradient: Mapping[str, Tensor]) -> float:
    return float(torch.stack([value.double().square().sum() for value in gradient.values()]).sum().sqrt())


def _product(left: Tensor, right: Tensor | float) -> float:
    return float((left.double() * right).sum()) if isinstance(right, Tensor) or right else 0.0
