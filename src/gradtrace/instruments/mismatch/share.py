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

import torch
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.instruments.contract import (
    Host,
    Observer,
    OptimizerStep,
    Pass,
    Reporter,
    Rows,
    Table,
    TrainingRun,
)
from gradtrace.instruments.record import Record

NOTABLE = 1e-3
"""Nats of the largest difference of the log-probs from which the share is worth its passes."""
STATE = "mismatch/largest"


class MismatchObserver(Observer):
    """Two gradients of the first mini-batch, at the weights that sampled it."""

    def __init__(self, host: Host, settings: int = 0) -> None:
        self.host = host
        self._sums: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
        """g_ρ and g_ρ − g_1 of the passes so far."""

    def begin(self, plan: bool) -> None:
        super().begin(plan)
        self._sums = {}, {}

    def before_passes(self, update: OptimizerStep, rows: Rows) -> None:
        for place, total in enumerate(self._sums if update.number == 0 else ()):
            found = self.host.gradient(rows, lambda one, place=place: sloped(one)[place])  # type: ignore[misc]
            for name, value in found.items():
                total[name] = total[name] + value if name in total else value

    def end(self) -> Table:
        (whole, due), self._sums = self._sums, ({}, {})
        pairs = (due, due), (due, whole), (whole, whole)
        self.table.facts = {"products": [sum(self.host.ranks.products(*pair).values()) for pair in pairs]}
        return self.table


def sloped(one: Pass) -> tuple[Tensor, Tensor]:
    """[b, T] each: what has the gradients g_ρ and g_ρ − g_1, the derivatives of the loss by the log-probs times ℓ."""
    sampled = one.column("sampler_log_probs")
    assert sampled is not None
    leaf, found = one.log_probs.detach().requires_grad_(), []
    with torch.enable_grad():
        for old in (sampled.to(leaf), one.log_probs.detach()):
            values = one.policy_terms(leaf, old)
            loss = (values * one.weights[:, None].to(values))[one.mask].sum()
            found.append(torch.autograd.grad(loss, leaf)[0])
    with_ratio, plain = found
    return with_ratio * one.log_probs, (with_ratio - plain) * one.log_probs


class MismatchReporter(Reporter):
    """Measures every `record.settings` steps, where sampler and trainer were seen to disagree; else it costs nothing.
    Where old log-probs are known after the update only, the step before decides."""

    def __init__(self, record: Record, run: TrainingRun | None = None) -> None:
        self.record = record
        self.largest = 0.0

    def plan(self, batch: RolloutBatch, step: int, sampled: RolloutBatch | None) -> tuple[RolloutBatch, bool | None]:
        known = bool(batch.sampler_log_probs.any())
        self._see(batch)
        is_due = step % self.record.settings == 0 and known and self.largest >= NOTABLE
        return batch, True if is_due else None

    def write(self, batch: RolloutBatch, step: int, table: Table | None) -> dict[str, float]:
        self.largest = 0.0
        self._see(batch)
        if table is not None and table.failure:
            self.record.failed(step, table.failure)
        return share_metrics(*table.facts["products"]) if table is not None and not table.failure else {}

    def _see(self, batch: RolloutBatch) -> None:
        if (gap := sampler_gap(batch)) is not None:
            self.largest = float(gap.abs().max())

    def state(self) -> dict[str, Tensor]:
        return {STATE: torch.tensor(self.largest)} if self.largest >= NOTABLE else {}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        self.largest = float(tensors.get(STATE, 0.0))


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
