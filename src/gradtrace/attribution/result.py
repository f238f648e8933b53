"""What `InfluenceTracer.score` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradtrace.attribution.config import InfluenceConfig
from gradtrace.attribution.labels import Labels
from gradtrace.attribution.scopes import ScopeBatch

SIGN = (
    "positive: a step along this token's gradient helps the accepted responses against the rejected ones;"
    " negative: the reverse"
)
UNIT = "change of the contrast of objectives per unit step along the token's gradient"


@dataclass(eq=False)
class InfluenceTrace:
    """Scores of one batch. Lists have one entry per response; responses that were not scored have empty ones.

    Sign and unit of every score: `SIGN` and `UNIT` in this module.
    """

    position_scores: list[Tensor]
    """R × [T_r]: credit by position; NaN for tokens past `max_tokens_per_response`."""
    loss_term_scores: list[Tensor] | None
    """R × [T_r]: credit by the token's own loss term, where it was asked for."""
    rest_scores: Tensor
    """[R]: position-credit scores of everything but the captured tokens (the prompt's positions), summed."""
    response_kernel: Tensor
    """[R, R]: g_rᵀ H⁻¹ g_s, both turned by `sign`; NaN where r and s are not in one scope."""
    skipped: dict[int, str] = field(default_factory=dict)
    """Groups that have no scores: id → constant_reward, not_captured, non_finite or other_rank."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Counters and timings, named as in the logs."""
    credit: str = "position"
    _pairwise: dict[int, tuple[list[int], Tensor]] = field(default_factory=dict)

    @property
    def token_scores(self) -> list[Tensor]:
        """R × [T_r], in the order of the tokens; by loss term if `credit` says so, else by position."""
        if self.credit == "loss_term" and self.loss_term_scores is not None:
            return self.loss_term_scores
        return self.position_scores

    @property
    def pairwise(self) -> list[Tensor]:
        """R × [T_r, R]: the effect of a step along each token's gradient on each response's log-prob objective
        (position credit); NaN outside its scope."""
        responses = len(self.position_scores)
        full = []
        for response, scores in enumerate(self.position_scores):
            dense = scores.new_full((len(scores), responses), torch.nan)
            if response in self._pairwise:
                members, block = self._pairwise[response]
                dense[: len(block), members] = block
            full.append(dense)
        return full

    def pairwise_of(self, response: int) -> tuple[list[int], Tensor]:
        """(members, [captured tokens, n]): the same without the empty part."""
        if response not in self._pairwise:
            return [], self.position_scores[response].new_empty(0, 0)
        return self._pairwise[response]

    def captured(self, response: int) -> Tensor:
        """bool[T_r]: tokens that have a score."""
        return ~torch.isnan(self.position_scores[response])


def assemble(
    batches: list[ScopeBatch],
    lengths: Mapping[int, int],
    labels: Labels,
    loss_terms: Mapping[int, Tensor],
    config: InfluenceConfig,
) -> InfluenceTrace:
    """The scores of all scopes, back in the order of the responses. `lengths`: tokens of this rank's responses."""
    responses = len(labels)
    like = next((batch.kernel for batch in batches if batch.kernel is not None), torch.zeros(0))
    position = [like.new_empty(0) for _ in range(responses)]
    loss_term = [like.new_empty(0) for _ in range(responses)]
    rest = like.new_zeros(responses)
    kernel = like.new_full((responses, responses), torch.nan)
    pairwise: dict[int, tuple[list[int], Tensor]] = {}
    for batch in batches:
        if batch.kernel is None or batch.position is None:
            continue
        # Of response r as a whole, by linearity: what all its positions together do to the contrast.
        through = (batch.kernel * batch.contrast.to(batch.kernel)).sum(2)
        for index, (scope, counts) in enumerate(zip(batch.scopes, batch.tokens, strict=True)):
            members = torch.tensor(scope.members)
            if counts:
                kernel[members[:, None], members] = batch.kernel[index]
            start = 0
            for response, count in counts.items():
                own = slice(start, start + count)
                start += count
                position[response] = like.new_full((lengths[response],), torch.nan)
                position[response][:count] = batch.position[index, own]
                whole = labels.sign_of(response) * through[index, scope.members.index(response)]
                if config.response_reduction == "mean":
                    whole = whole * max(lengths[response], 1)
                rest[response] = whole - batch.position[index, own].sum()
                if batch.pairwise is not None:
                    pairwise[response] = (scope.members, batch.pairwise[index, own])
                if response in loss_terms:
                    loss_term[response] = loss_terms[response]
    return InfluenceTrace(
        position_scores=position,
        loss_term_scores=loss_term if config.wants_loss_term else None,
        rest_scores=rest,
        response_kernel=kernel,
        credit=config.credit,
        _pairwise=pairwise,
    )


def counters(batches: list[ScopeBatch], labels: Labels, skipped: Mapping[int, str]) -> dict[str, float]:
    """What was scored and what was not, under the names of the logs."""
    mixed, total = len(labels.mixed_groups()), len(labels.groups())
    scored = [
        (scope, counts)
        for batch in batches
        for scope, counts in zip(batch.scopes, batch.tokens, strict=True)
        if counts
    ]
    reasons = list(skipped.values())
    metrics: dict[str, float] = {
        "influence_trace/selected_responses": sum(len(counts) for _, counts in scored),
        "influence_trace/selected_prompts": sum(len(scope.groups) for scope, _ in scored),
        "influence_trace/uid_total": total,
        "influence_trace/uid_constant": total - mixed,
        "influence_trace/uid_mixed": mixed,
        "influence_trace/rows_emitted": sum(len(counts) for _, counts in scored),
        "influence_trace/tokens_emitted": sum(sum(counts.values()) for _, counts in scored),
        "influence_trace/debug_groups_not_captured": reasons.count("not_captured"),
        "influence_trace/debug_groups_non_finite": reasons.count("non_finite"),
    }
    for batch in batches:
        for name, number in batch.solvers.items():
            key = f"influence_trace/debug_solver_{name}"
            metrics[key] = metrics.get(key, 0) + number
    return {name: float(value) for name, value in metrics.items()}
