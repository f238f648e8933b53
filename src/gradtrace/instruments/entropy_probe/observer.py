"""The entropy probe beside the weights: ΔH of the optimizer step about to be taken, predicted, then measured.

Which step: the first optimizer step of a training step. Its gradient is complete, the weights are still those that
sampled; E was sampled from them, from prompts that are never trained on. The prediction is made before the weights
move, the measurement right after, at the weights that the optimizer really made. Later mini-batches of the same
rollout are not probed: they start from other weights, and each would need its own E.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.instruments.contract import Gradient, Host, Observer, OptimizerStep, Pass, Rows
from gradtrace.instruments.entropy_probe import EntropyProbeConfig
from gradtrace.instruments.entropy_probe.estimates import Tokens
from gradtrace.instruments.entropy_probe.passes import Pass as TokenPass
from gradtrace.instruments.entropy_probe.passes import TokenBatch
from gradtrace.instruments.entropy_probe.probe import EntropyProbe


class ProbeObserver(Observer):
    def __init__(self, host: Host, settings: EntropyProbeConfig) -> None:
        self.host = host
        self.probe = EntropyProbe(host.model, host.optimizer, host=host)
        self._evaluation: Rows | None = None
        """This process's part of E."""
        self._batch: TokenBatch | None = None

    def begin(self, plan: RolloutBatch) -> None:
        """A probed step begins; `plan` is its evaluation batch."""
        super().begin(plan)
        self._evaluation = self.host.dealt(plan, apart=True, entropies=True)
        self._batch = None

    def before_step(self, update: OptimizerStep) -> None:
        coming, rows = self.host.next_gradient(), self._evaluation
        if update.number or coming is None or rows is None:
            return
        with self.host.aside():
            coming_update = self.probe.update_of(coming.values, coming.clip_factor)
            self._batch = batch = self._token_batch(rows)
            prediction = self.probe.predict(batch, coming_update)
            coming_update.direction.clear()  # its memory is needed
            own = self.host.own(update)
            shares = self.probe.shares(prediction, batch, coming_update, self._loss_terms(own))
        self.table.put("base", rows.split(pair(prediction.base)))
        self.table.put("derivative", rows.split(torch.stack([prediction.d_log_probs, prediction.d_entropies])))
        self.table.put("shares", own.split(shares.tokens))
        self.table.facts = {
            "momentum": shares.momentum,
            "decay": shares.decay,
            "legacy": shares.legacy,
            "rate": float(self.host.optimizer.param_groups[0]["lr"]),
        }

    def after_step(self, update: OptimizerStep, moved: bool) -> None:
        """The same E at the weights that the optimizer has really made."""
        batch, self._batch, rows = self._batch, None, self._evaluation
        if batch is None or rows is None or not moved:
            return
        with self.host.aside():
            self.table.put("after", rows.split(pair(self.probe.tokens(batch))))

    def drop(self) -> None:
        self._batch = self._evaluation = None

    def _token_batch(self, rows: Rows) -> TokenBatch:
        """E: log-probs and entropies of its tokens."""

        def gradient(weights: Tensor) -> Gradient:
            weight_of = dict(zip(rows.ids.tolist(), weights.tolist(), strict=True))

            def objective(one: Pass) -> Tensor:
                own = one.log_probs.new_tensor([weight_of.get(row, 0.0) for row in one.rows.tolist()])[:, None]
                real = (one.rows >= 0).to(one.mask.device)[:, None] & one.mask
                return (entropies_of(one) + own * one.log_probs) * real

            return self.host.gradient(rows, objective)

        everything = TokenPass(torch.arange(len(rows.ids)), lambda: self.host.values(rows, of_tokens))
        return TokenBatch(rows.mask.sum(1), rows.ids, lambda: [everything], gradient)

    def _loss_terms(self, rows: Rows) -> TokenBatch:
        """U: the loss terms of the mini-batch that the gradient is of."""

        def weighted(one: Pass) -> Tensor:
            losses = one.terms()
            return losses * one.weights[:, None].to(losses)

        everything = TokenPass(torch.arange(len(rows.ids)), lambda: self.host.values(rows, weighted))
        return TokenBatch(rows.mask.sum(1), rows.ids, lambda: [everything])


def of_tokens(one: Pass) -> Tensor:
    """[2, b, T]"""
    return torch.stack([one.log_probs, entropies_of(one)])


def entropies_of(one: Pass) -> Tensor:
    assert one.entropies is not None, "passes over E compute entropies"
    return one.entropies


def pair(tokens: Tokens) -> Tensor:
    """float64[2, N]: log-probs and entropies."""
    return torch.stack([tokens.log_probs, tokens.entropies])
