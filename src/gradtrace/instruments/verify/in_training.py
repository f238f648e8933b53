"""The check inside of training: a few real steps on random halves of one group, before the step that training takes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gradtrace.attribution import AttributionError
from gradtrace.batch import RolloutBatch
from gradtrace.instruments.influence.capture import Scored
from gradtrace.instruments.influence.plan import StepPlan
from gradtrace.instruments.verify.measure import random_halves
from gradtrace.instruments.verify.trial import BASELINE, Trial, check
from gradtrace.rollout.sampler import evaluation_mode

HALVES = 12
VALIDITY, VALIDITY_BASELINE = "influence_trace/validity", "influence_trace/validity_baseline"


class TrainingCheck:
    """Takes steps on the weights that are trained and puts them back, bit by bit. It draws from a generator of its own,
    so that training does not notice."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, temperature: float, grad_clip: float
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.temperature = temperature
        self.grad_clip = grad_clip
        fine = {"torch.float32", "torch.float64"}
        if coarse := {str(p.dtype) for p in model.parameters() if p.requires_grad} - fine:
            raise AttributionError(
                f"verify_every: weights are {', '.join(sorted(coarse))}, which round away what one step does. Leave it "
                "out and run `gradtrace verify` on a checkpoint, which measures in float32"
            )

    def run(
        self, batch: RolloutBatch, plan: StepPlan, scored: Scored, raised: Callable[[list[int]], Tensor], tokens: int
    ) -> dict[str, float]:
        """Metrics. `raised`: places in `scored` → [N], what training raises, token by token; `tokens`: of the
        mini-batch."""
        places = one_group(plan, scored)
        if not places:
            return {}
        check({name: p for name, p in self.model.named_parameters() if p.requires_grad}, self.optimizer)
        rows = scored.rows[places].tolist()
        lengths, counts = batch.response_lengths[rows].tolist(), batch.written_counts[rows].tolist()
        prompts = [batch.prompts[g] for g in batch.group[rows].tolist()]
        trial = Trial(
            self.model,
            self.optimizer,
            [torch.tensor(p + batch.responses[r, :n].tolist()) for p, r, n in zip(prompts, rows, lengths, strict=True)],
            [len(prompt) for prompt in prompts],
            torch.zeros(len(rows), dtype=torch.long),
            plan.accepted[rows],
            plan.advantages[rows],
            temperature=self.temperature,
            grad_clip=self.grad_clip,
            tokens=tokens,
            written=[batch.response_mask[r, :n] for r, n in zip(rows, lengths, strict=True)],
            step_terms=lambda some: list(raised([places[r] for r in some]).split([counts[r] for r in some])),
        )
        scores = {r: scored.trace.token_scores[place].double().cpu() for r, place in enumerate(places)}
        generator = torch.Generator().manual_seed(plan.step)
        with evaluation_mode(self.model):
            effects = random_halves(trial, [0], HALVES, "half_tokens", generator).take_all(trial)
            baseline = trial.baselines()[BASELINE]
        found = {VALIDITY: effects.agreement(scores), VALIDITY_BASELINE: effects.agreement(baseline)}
        return {name: value for name, value in found.items() if value == value}


def one_group(plan: StepPlan, scored: Scored) -> list[int]:
    """Places of the responses of one group with both accepted and rejected ones."""
    groups = plan.group[scored.rows]
    found: dict[int, list[int]] = {}
    for place, group in enumerate(groups.tolist()):
        if len(scored.trace.token_scores[place]):
            found.setdefault(group, []).append(place)
    mixed = [places for places in found.values() if plan.accepted[scored.rows[places]].unique().numel() == 2]
    return mixed[0] if mixed else []
