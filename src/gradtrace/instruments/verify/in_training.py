"""The check inside of training: real steps of the coming mini-batch, before the one that training takes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradtrace.attribution import AttributionError
from gradtrace.attribution.geometry import unwrapped
from gradtrace.instruments.contract import Host, Pass, Rows
from gradtrace.instruments.verify.measure import spearman
from gradtrace.instruments.verify.trial import HALF, RealSteps, check

STEPS = 12
SHARE = 1 / 8
"""Of the responses: half of their tokens weigh more, then less, in a pair of steps."""
VALIDITY, VALIDITY_BASELINE = "influence_trace/validity", "influence_trace/validity_baseline"
Objective = Callable[[Pass], Tensor]
"""[b, T]: every token's own term of J, which is minus the loss."""


class TrainingCheck:
    """Takes steps on the weights that are trained and puts them back, bit by bit. It draws from a generator of its own,
    so that training does not notice."""

    def __init__(self, host: Host) -> None:
        self.host = host
        trained = {name: p for name, p in host.model.named_parameters() if p.requires_grad}
        if coarse := {str(p.dtype) for p in trained.values()} - {"torch.float32", "torch.float64"}:
            raise AttributionError(
                f"verify_every: weights are {', '.join(sorted(coarse))}, which round away what one step does. Leave it "
                "out and run `gradtrace verify` on a checkpoint, which measures in float32"
            )
        check(trained, unwrapped(host.optimizer))

    def run(self, rows: Rows, parts: Tensor, objective: Objective, step: int) -> dict[str, float]:
        """Metrics, between the last backward pass and the optimizer step: the rank correlation of sums of `parts`,
        float[N] of the tokens of `rows`, with what training on them does to J; beside it that of |A|(1−p). `rows` are
        all rows of the coming optimizer step; `step` seeds what is drawn."""
        coming = self.host.next_gradient()
        if coming is None:
            raise AttributionError(
                "its passes belong to several optimizer steps, so its scores to different weights. Run `gradtrace "
                "verify` on a checkpoint, or gradtrace.verify() between two rollouts"
            )
        generator = torch.Generator().manual_seed(step)
        steps = RealSteps(self.host.model, unwrapped(self.host.optimizer))
        with self.host.aside():
            free = self.host.values(rows, baseline).double().cpu()
            predicted, measured = [], []
            for _ in range(STEPS):
                chosen = drawn(rows, generator)
                own = self.host.gradient(rows.pick(rows.ids[chosen.any(1)]), only(rows, chosen, objective))
                ends = []
                for half in (HALF, -HALF):  # the gradient of J points up, that of the loss down
                    change = -half * coming.clip_factor
                    changed = {
                        name: whole + change * own[name] if name in own else whole
                        for name, whole in coming.values.items()
                    }
                    ends.append(steps.effect(changed, lambda: self.host.values(rows, objective).double().sum()))
                flat = chosen[rows.mask]
                predicted.append([float(parts.double().cpu()[flat].sum()), float(free[flat].sum())])
                measured.append(float(ends[0] - ends[1]))
        ours, theirs = torch.tensor(predicted).T
        effects = torch.tensor(measured)
        found = {VALIDITY: spearman(ours, effects), VALIDITY_BASELINE: spearman(theirs, effects)}
        return {name: value for name, value in found.items() if value == value}


def drawn(rows: Rows, generator: torch.Generator) -> Tensor:
    """bool[r, T]: half of the tokens of some responses."""
    count = max(1, round(SHARE * len(rows.ids)))
    some = torch.zeros(len(rows.ids), 1, dtype=torch.bool)
    some[torch.randperm(len(rows.ids), generator=generator)[:count]] = True
    return rows.mask.cpu() & some & (torch.rand(rows.mask.shape, generator=generator) < 0.5)


def only(rows: Rows, chosen: Tensor, objective: Objective) -> Objective:
    """The objective of the chosen tokens."""
    place = {row: index for index, row in enumerate(rows.ids.tolist())}

    def of(one: Pass) -> Tensor:
        table = chosen[[place.get(row, 0) for row in one.rows.tolist()], : one.mask.shape[1]]
        return objective(one) * (table.to(one.mask.device) & one.mask)

    return of


def baseline(one: Pass) -> Tensor:
    """|A|(1−p) of every token."""
    advantages = one.column("advantages")
    assert advantages is not None
    return advantages.abs() * (1 - one.log_probs.exp())
