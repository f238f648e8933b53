"""Steps on single tokens, single responses and random halves of a mini-batch, and how well scores order their
effects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradtrace.instruments.verify.agreement import spearman
from gradtrace.instruments.verify.trial import Gradient, Trial

Scores = Mapping[int, Tensor]
"""Response → [T_r]."""
KINDS = ("single_token", "single_response", "half_tokens", "batch_tokens", "batch_responses")
"""One token; one response; a random half of the group's own tokens; of the mini-batch's tokens; of its responses. The
first three are about their own group's contrast, the others about the sum of all groups' contrasts."""


@dataclass(eq=False)
class Effects:
    """What was measured of one kind for one group (or for the whole mini-batch): each step and its effect."""

    chosen: list[dict[int, Tensor]] = field(default_factory=list)
    """Per step: response → bool[T_r], the tokens that it was taken on."""
    measured: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))
    norms: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))
    """Squared norm of each step's gradient."""

    def agreement(self, scores: Scores) -> float:
        """Spearman's rank correlation of the effects with the sums of the scores."""
        sums = [
            sum(float(scores[r][mask].sum()) for r, mask in step.items() if r in scores)
            for step in self.chosen
        ]
        return spearman(torch.tensor(sums, dtype=torch.float64), self.measured)

    def squared_norms(self, trial: Trial) -> dict[int, Tensor]:
        """|A|·‖g‖² of the tokens that were stepped on one by one, with g the gradient of the token's log-prob; 0 for
        the others. Response → [T_r]."""
        found: dict[int, Tensor] = {}
        for step, norm in zip(self.chosen, self.norms.tolist(), strict=True):
            ((r, mask),) = step.items()
            values = found.setdefault(r, torch.zeros(trial.lengths[r], dtype=torch.float64))
            values[mask] = norm / max(float(trial.advantages[r].abs()), 1e-300)
        return found


def single_tokens(trial: Trial, group: int, limit: int, generator: torch.Generator) -> Effects:
    """A step on each of (at most `limit`, drawn at random) tokens of a group."""
    places = [(r, t) for r in trial.members[group] for t in range(trial.lengths[r])]
    order = torch.randperm(len(places), generator=generator)[: limit or len(places)].sort().values.tolist()
    found = Effects()
    effects, norms = [], []
    for r in trial.members[group]:
        own = [places[i][1] for i in order if places[i][0] == r]
        if not own:
            continue

        def noted(response: int = r, own: list[int] = own) -> Iterator[Gradient]:
            for gradient in trial.token_gradients(response, own):
                norms.append(sum(float(g.square().sum()) for g in gradient.values()))
                yield gradient

        effects.append(trial.effects(noted(), [group])[:, 0])
        for t in own:
            mask = torch.zeros(trial.lengths[r], dtype=torch.bool)
            mask[t] = True
            found.chosen.append({r: mask})
    found.measured, found.norms = torch.cat(effects).double(), torch.tensor(norms, dtype=torch.float64)
    return found


def subsets(trial: Trial, chosen: list[dict[int, Tensor]], groups: list[int]) -> Effects:
    """A step on each subset, and its effect on the sum of the groups' contrasts."""
    gradients = (trial.subset_gradient(step) for step in chosen)
    return Effects(chosen, trial.effects(gradients, groups).sum(1).double())


def single_responses(trial: Trial, group: int) -> Effects:
    chosen = [{r: torch.ones(trial.lengths[r], dtype=torch.bool)} for r in trial.members[group]]
    return subsets(trial, chosen, [group])


def random_halves(
    trial: Trial, groups: list[int], count: int, by_response: bool, generator: torch.Generator
) -> Effects:
    """Steps on random halves of the groups' tokens, or of their responses."""
    responses = [r for group in groups for r in trial.members[group]]
    chosen = []
    for _ in range(count):
        if by_response:
            drawn = torch.rand(len(responses), generator=generator) < 0.5
            masks = [torch.full((trial.lengths[r],), bool(d)) for r, d in zip(responses, drawn, strict=True)]
        else:
            masks = [torch.rand(trial.lengths[r], generator=generator) < 0.5 for r in responses]
        chosen.append(dict(zip(responses, masks, strict=True)))
    return subsets(trial, chosen, groups)
