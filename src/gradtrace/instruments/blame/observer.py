"""Blame beside the weights: the shares of an optimizer step's ‖g‖², before it is taken.

A token's share is w_t⟨∇L_t, g⟩/‖g‖²: the derivative of its own loss term along the whole gradient, over every trainable
weight. The norms and sketches of response gradients are captured on the training passes, or on passes of their own
where responses share prompts there. On several ranks g is the mean of their gradients, and each shares out what the
responses have that it trained on.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from gradtrace.instruments.blame import BlameConfig
from gradtrace.instruments.blame.response_gradients import ResponseGradients
from gradtrace.instruments.blame.sharing import Sharing, UsualNorms
from gradtrace.instruments.contract import Backward, Host, Observer, OptimizerStep, Pass, Rows, Table


class BlameObserver(Observer):
    def __init__(self, host: Host, settings: BlameConfig) -> None:
        self.host = host
        self.gradients = ResponseGradients(host.model, settings.sketch_dim)
        self.gradients.close()  # hooks are on the model during updates only: the sampler's fast path wants it bare
        measured = [block.parameter_name for block in self.gradients.blocks]
        self.sharing = Sharing(host, host.model, host.optimizer, measured)
        self.usual = UsualNorms(settings.unusual_ratio)
        self._is_due = False
        self._unmeasured = False
        """Passes of training shared their prompts, so that the norms of this optimizer step are still to be taken."""

    def begin(self, plan: bool) -> None:
        """`plan`: share out whatever the gradient is like; else only if it is unusual."""
        super().begin(plan)
        self._is_due, self._unmeasured = plan, False
        self.table.facts = {"updates": [], "largest_norm": 0.0}
        if plan:
            self.gradients.attach()

    def around_backward(self, backward: Backward) -> AbstractContextManager[Any]:
        number = torch.tensor(backward.number)
        self.table.put("optimizer_step", {row: number for row in backward.rows.tolist() if row >= 0})
        if not self._is_due:
            return nullcontext()
        if backward.prompt_rows is not None:
            self._unmeasured = True
            return nullcontext()
        return self._captured(backward)

    def _captured(self, backward: Backward) -> AbstractContextManager[Any]:
        return self.gradients.capture(response=backward.response, tokens=backward.tokens)

    def before_step(self, update: OptimizerStep) -> None:
        self._measure_apart(update)
        with self.host.aside():
            self._share_out(update)

    def after_step(self, update: OptimizerStep, moved: bool) -> None:
        """Of a step that was not made there is nothing to share out, but the norms of single responses say whose
        gradient was not finite."""
        self._measure_apart(update)

    def _share_out(self, update: OptimizerStep) -> None:
        coming = self.host.next_gradient()
        if coming is None:
            return
        norm = self.sharing.norm(coming.values, coming.clip_factor)
        if not math.isfinite(norm):
            return
        wanted = self.usual.is_unusual(norm) or self._is_due
        self.table.facts["largest_norm"] = max(self.table.facts["largest_norm"], norm)
        if not norm or not wanted:
            return
        rows = self.host.own(update)

        def weighted(one: Pass) -> Tensor:
            losses = one.terms()
            return torch.stack([losses * one.weights[:, None].to(losses), one.log_probs])

        found, about = self.sharing.share_out(
            lambda: self.host.values(rows, weighted),
            coming.values,
            coming.clip_factor,
            update.number,
            None if self.host.is_exact else self._weight(rows),
        )
        self.table.put("tokens", rows.split(found))
        self.table.facts["updates"].append(about)

    def _weight(self, rows: Rows) -> float:
        """Σ_t |w_t A_t| over the tokens of all ranks: how the loss weighs log-probs. Collective."""
        advantages = rows.column("advantages")
        assert advantages is not None
        sizes = (advantages.abs() * rows.mask).sum(1).double()
        return sum(self.host.ranks.gather(float(rows.weights @ sizes)))

    def _measure_apart(self, update: OptimizerStep) -> None:
        """Norms and sketches in passes in which each response has its prompt to itself; the gradients are dropped."""
        if not self._unmeasured:
            return
        self._unmeasured = False
        size = self.host.ranks.size

        def loss(one: Pass) -> Tensor:
            losses = one.terms()
            return losses * (one.weights[:, None] * one.mask * size).to(losses)

        self.host.listen(self.host.own(update), loss, self._captured)

    def end(self) -> Table:
        self.gradients.close()
        norms, sketches = self.gradients.take()
        size = self.host.ranks.size  # they are parts of the mean over ranks
        self.table.put("norm", {row: torch.tensor(norm / size, dtype=torch.float64) for row, norm in norms.items()})
        self.table.put("sketch", {row: sketch / size for row, sketch in sketches.items()})
        return self.table

    def drop(self) -> None:
        self.gradients.close()
        self.gradients.take()

    def close(self) -> None:
        self.gradients.close()
