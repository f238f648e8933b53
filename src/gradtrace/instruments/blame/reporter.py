"""Blame beside the files: what is known of a training step, the arithmetic on it, its file and its metrics."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.instruments.columns import token_column
from gradtrace.instruments.contract import Reporter, Table, TrainingRun
from gradtrace.instruments.record import Record


@dataclass(eq=False)
class StepBlame:
    """Shares of one training step's responses, each of the optimizer step that it was trained in."""

    share: Tensor
    """float64[R, T]: of ‖g‖², by each token's own loss term; zero outside the mask."""
    push: Tensor
    """float64[R, T]: −⟨∇ℓ_t, g⟩, the change of a token's log-prob by a plain gradient step of rate 1."""
    norm: Tensor
    """float64[R]: ‖g_r‖ in the linear layers; NaN where no pass was seen."""
    log_probs: Tensor
    """float64[R, T]: of the tokens, at the weights before their optimizer step."""
    optimizer_step: Tensor
    """long[R]: which optimizer step of this rollout; −1 where the response had none."""
    sketch: dict[int, Tensor] = field(default_factory=dict)
    """Row → its projected gradient."""
    updates: list[dict[str, float]] = field(default_factory=list)
    """One for each optimizer step: what the file's meta says of it."""
    skipped: list[int] = field(default_factory=list)
    """Optimizer steps that were not made, their gradient not being finite."""

    @staticmethod
    def of(batch: RolloutBatch) -> StepBlame:
        share, push, log_probs = torch.zeros(3, *batch.response_mask.shape, dtype=torch.float64)
        norm = torch.full((len(batch),), torch.nan, dtype=torch.float64)
        return StepBlame(share, push, norm, log_probs, torch.full((len(batch),), -1))

    @staticmethod
    def of_table(batch: RolloutBatch, table: Table) -> StepBlame:
        """What the observers of all processes have found."""
        blame, columns = StepBlame.of(batch), table.columns
        for row, number in columns.get("optimizer_step", {}).items():
            blame.optimizer_step[row] = number
        for row, values in columns.get("tokens", {}).items():
            where = row, batch.response_mask[row]
            blame.share[where], blame.push[where], blame.log_probs[where] = values
        for row, norm in columns.get("norm", {}).items():
            blame.norm[row] = norm
        blame.sketch, blame.updates = columns.get("sketch", {}), list(table.facts.get("updates", []))
        return blame

    @property
    def rows(self) -> Tensor:
        """long[r]: the responses that had a pass."""
        return (self.optimizer_step >= 0).nonzero().squeeze(-1)

    @property
    def response_share(self) -> Tensor:
        """float64[R]: the sum of its tokens' shares."""
        return self.share.sum(1)

    def of_the_step(self) -> StepBlame:
        """The same with shares of Σ‖g‖² over all optimizer steps of the step, which add up to 1."""
        square = {int(update["number"]): update["grad_norm"] ** 2 for update in self.updates}
        total = sum(square.values()) or 1.0
        weight = [square.get(number, 0.0) / total for number in self.optimizer_step.tolist()]
        return replace(self, share=self.share * torch.tensor(weight, dtype=torch.float64)[:, None])

    def group_share(self, batch: RolloutBatch) -> Tensor:
        """float64[G]: by each prompt's responses together."""
        total = torch.zeros(len(batch.prompts), dtype=torch.float64)
        return total.index_add(0, batch.group, self.response_share)

    def kernel(self) -> Tensor:
        """float64[r, r] of `rows`: ⟨g_r, g_s⟩/‖g‖² by sketches, within an optimizer step; zero between two of them."""
        rows = self.rows
        if not len(rows) or any(row not in self.sketch for row in rows.tolist()):
            return torch.zeros(len(rows), len(rows), dtype=torch.float64)
        sketches = torch.stack([self.sketch[row] for row in rows.tolist()]).double()
        step = self.optimizer_step[rows]
        square = torch.ones(int(step.max()) + 1, dtype=torch.float64)
        for update in self.updates:
            square[int(update["number"])] = max(update["grad_norm"] ** 2, 1e-300)
        return (sketches @ sketches.T / square[step][:, None]).masked_fill(step[:, None] != step, 0.0)


def blame_columns(batch: RolloutBatch, blame: StepBlame) -> dict[str, Any]:
    rows = blame.rows
    columns = {
        "optimizer_step": blame.optimizer_step[rows].numpy(),
        "grad_share": blame.response_share[rows].numpy(),
        "grad_norm": blame.norm[rows].numpy(),
        "token_grad_share": token_column(blame.share, batch, rows),
        "push": token_column(blame.push, batch, rows),
        **pair_columns(blame.kernel(), batch.group[rows]),
    }
    if batch.ref_log_probs is not None:
        gap = batch.need("old_log_probs") - batch.ref_log_probs
        columns["reference_gap"] = token_column(gap, batch, rows)
    return columns


def pair_columns(kernel: Tensor, group: Tensor) -> dict[str, np.ndarray]:
    """Who stands with and against each response: itself, its siblings, the others, and its strongest opponent."""
    if not len(kernel):
        empty = np.empty(0)
        names = ("product_self", "product_siblings", "product_others", "opponent_product")
        return {**dict.fromkeys(names, empty), "opponent": np.empty(0, np.int32)}
    own = kernel.diagonal()
    same = group[:, None] == group
    siblings = (kernel * same).sum(1) - own
    least, opponent = kernel.clone().fill_diagonal_(0.0).min(1)
    return {
        "product_self": own.numpy(),
        "product_siblings": siblings.numpy(),
        "product_others": (kernel * ~same).sum(1).numpy(),
        "opponent": torch.where(least < 0, opponent, -1).int().numpy(),
        "opponent_product": least.numpy(),
    }


def blame_metrics(batch: RolloutBatch, blame: StepBlame) -> dict[str, float]:
    rows = blame.rows
    if not len(rows) or not blame.updates:
        return {}
    push = blame.push * batch.need("advantages").double()
    trained = batch.response_mask[rows] & (batch.need("advantages")[rows] != 0)
    against = (push[rows] < 0) & trained
    return {
        "blame/top_response": float(blame.response_share[rows].max()),
        "blame/top_prompt": float(blame.group_share(batch).max()),
        "blame/cancelled_tokens": float(against.sum() / trained.sum().clamp(min=1)),
        "blame/residual": max(abs(update["residual"]) for update in blame.updates),
    }


class BlameReporter(Reporter):
    def __init__(self, record: Record, run: TrainingRun) -> None:
        self.record = record
        self.last: StepBlame | None = None
        """Of the step that was written last; None if it was not shared out."""

    def is_due(self, step: int) -> bool:
        """Whether this step is shared out whatever its gradient is like, with the gradients of its responses."""
        return bool(step % self.record.settings.write_every == 0)

    def plan(self, batch: RolloutBatch, step: int, sampled: RolloutBatch | None) -> tuple[RolloutBatch, bool]:
        return batch, self.is_due(step)

    def write(self, batch: RolloutBatch, step: int, table: Table | None) -> dict[str, float]:
        """Write the file of a step that is due or was unusual."""
        record, self.last = self.record, None
        if table is not None and table.failure:
            record.failed(step, table.failure)
        metrics = {"blame/errors": float(record.errors), "blame/write_errors": record.write_errors}
        if table is None or table.failure:
            return metrics
        if table.facts["largest_norm"]:
            metrics["blame/largest_grad_norm"] = table.facts["largest_norm"]
        blame = StepBlame.of_table(batch, table)
        if not (self.is_due(step) or blame.updates):
            return metrics
        made = torch.tensor([int(update["number"]) for update in blame.updates])
        if not self.is_due(step):  # of an unusual step only the optimizer steps that were
            blame.optimizer_step[~torch.isin(blame.optimizer_step, made)] = -1
        blame.skipped = sorted(set(blame.optimizer_step[blame.rows].tolist()) - set(made.tolist()))
        meta = {"updates": blame.updates, "skipped": blame.skipped}
        record.write(step, batch, blame.rows, blame_columns(batch, blame), meta)
        self.last = blame
        return {**blame_metrics(batch, blame), **metrics, "timing_s/blame": table.seconds}
