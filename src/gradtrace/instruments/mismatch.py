"""How much of the update is due to the sampler's log-probs not being the trainer's.

ρ_t = π_trainer(t) / π_sampler(t) is 1 where both compute the same distribution. With g_ρ the gradient of the policy
loss whose old log-probs are the sampler's (its ratio is ρ, clipped as the loss clips) and g_1 the same with every ratio
1, both of the first mini-batch of a step, at the weights that sampled it:

    share_of_update       = ‖g_ρ − g_1‖ / ‖g_ρ‖
    share_of_squared_norm = ⟨g_ρ − g_1, g_ρ⟩ / ‖g_ρ‖²

A loop that takes the sampler's log-probs as old ones follows g_ρ, and this share of its update comes from the mismatch;
one that recomputes them follows g_1, and this is what a correction would change. A token's own term is scaled by its
ratio: so is its influence.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradtrace.algorithms import LossInputs, LossOutputs
from gradtrace.attribution.collectives import Ranks
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.observer import Backward, StepObserver
from gradtrace.policy.microbatch import MicroBatch
from gradtrace.policy.policy import Policy

NOTABLE = 1e-3
"""Nats of the largest difference in the step before, from which the share is worth its passes."""
STATE = "mismatch/largest"


@dataclass(eq=False)
class MismatchShare(StepObserver):
    """Measures every `every` steps, where sampler and trainer disagreed in the step before; else it costs nothing."""

    policy: Policy
    loss: Callable[[LossInputs], LossOutputs]
    every: int
    ranks: Ranks = field(default_factory=Ranks)
    """Each has the whole model; gradients are added up over them."""
    batch: RolloutBatch | None = field(default=None, init=False)
    """Of the step that is measured."""
    largest: float = field(default=0.0, init=False)
    _due: list[Tensor] = field(default_factory=list, init=False)
    _whole: list[Tensor] = field(default_factory=list, init=False)

    def before_update(self, batch: RolloutBatch, step: int) -> RolloutBatch:
        known = bool(batch.sampler_log_probs.any())
        measured = self.every and step % self.every == 0 and known and self.largest >= NOTABLE
        self.batch = batch if measured else None
        self._due, self._whole = [], []
        return batch

    def around_backward(self, backward: Backward) -> AbstractContextManager[Any]:
        if self.batch is not None and backward.number == 0 and backward.update.epoch == 0:
            self._add(self.batch, backward.micro, backward.token_weights)
        return nullcontext()

    def _add(self, batch: RolloutBatch, micro: MicroBatch, token_weights: Tensor) -> None:
        """Two backward passes, from the derivatives of the loss by the log-probs, whose results go nowhere else."""
        log_probs, entropies = (micro.unflatten(values) for values in self.policy.statistics(micro))
        device = log_probs.device
        mask, weights = micro.mask.to(device), token_weights.to(device)

        def loss(leaf: Tensor, old: Tensor) -> Tensor:
            inputs = LossInputs(
                log_probs=leaf,
                old_log_probs=old,
                advantages=micro.column(batch, "advantages", device),
                mask=mask,
                ref_log_probs=micro.column(batch, "ref_log_probs", device),
                entropies=entropies.detach(),
            )
            return (self.loss(inputs).loss * weights)[mask].sum()

        sampled = micro.column(batch, "sampler_log_probs", device)
        with_ratio, difference = slopes(loss, log_probs, sampled)
        parameters = list(self.policy.trainable().values())
        for slope, total, keep in ((difference, self._due, True), (with_ratio, self._whole, False)):
            found = torch.autograd.grad(log_probs, parameters, slope, retain_graph=keep, allow_unused=True)
            own = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
            total[:] = own if not total else [a + b for a, b in zip(total, own, strict=True)]

    def after_update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        gap = sampler_gap(batch)
        self.largest = 0.0 if gap is None else float(gap.abs().max())
        if not self._whole:
            return {}
        for part in (*self._due, *self._whole):
            self.ranks.sum(part)
        dot = sum(float((a.double() * b.double()).sum()) for a, b in zip(self._due, self._whole, strict=True))
        due, whole = (sum(float(a.double().square().sum()) for a in part) for part in (self._due, self._whole))
        self._due, self._whole, self.batch = [], [], None
        return share_metrics(due, dot, whole)

    def state(self) -> dict[str, Tensor]:
        return {STATE: torch.tensor(self.largest)} if self.largest >= NOTABLE else {}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        self.largest = float(tensors.get(STATE, 0.0))


def slopes(loss: Callable[[Tensor, Tensor], Tensor], log_probs: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor]:
    """[r, T]: derivatives of `loss(log_probs, old log-probs)` by the log-probs, whose products with ∇ℓ make g_ρ and
    g_ρ − g_1. `sampled`: the sampler's log-probs."""
    leaf = log_probs.detach().requires_grad_()
    with torch.enable_grad():
        with_ratio, plain = (torch.autograd.grad(loss(leaf, old), leaf)[0] for old in (sampled, log_probs.detach()))
    return with_ratio, with_ratio - plain


def share_metrics(due: float, dot: float, whole: float) -> dict[str, float]:
    """From ‖g_ρ − g_1‖², ⟨g_ρ − g_1, g_ρ⟩ and ‖g_ρ‖²."""
    if not whole:
        return {}
    return {
        "mismatch/share_of_update": (due / whole) ** 0.5,
        "mismatch/share_of_squared_norm": dot / whole,
    }


def sampler_gap(batch: RolloutBatch) -> Tensor | None:
    """float[R, T]: the trainer's log-prob of a token minus the sampler's; None where a host does not know both.
    Rows that are zero throughout were taken over from the sampler."""
    if batch.old_log_probs is None or not bool(batch.sampler_log_probs.any()):
        return None
    return torch.where(batch.response_mask, batch.old_log_probs - batch.sampler_log_probs, 0.0)
