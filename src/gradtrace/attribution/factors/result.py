"""What `InfluenceTracer.score` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradtrace.attribution.config import InfluenceConfig
from gradtrace.attribution.factors.scopes import Labels, ScopeBatch

SIGN = "positive: training on this token helps the accepted responses against the rejected ones; negative: the reverse"
UNIT = "change of the contrast of mean log-probs per unit of learning rate, when training takes this token's step"
LABELS_ALONE = 0.95
"""Above this R² the responses' totals say nothing that labels and lengths do not."""


@dataclass(eq=False)
class InfluenceTrace:
    """Scores of one batch. Lists have one entry per response; responses that were not scored have empty ones.

    Sign and unit of every score: `SIGN` and `UNIT` in this module, and what they are of in `meta`.
    """

    position_scores: list[Tensor]
    """R × [T_r]: credit by position, taken in the backward pass; NaN for tokens past `max_tokens_per_response`."""
    loss_term_scores: list[Tensor] | None
    """R × [T_r]: credit by the token's own loss term, where it was asked for."""
    rest_scores: Tensor
    """[R]: position-credit scores of everything but the captured tokens (the prompt's positions), summed; NaN where
    step and target had passes of their own."""
    response_kernel: Tensor
    """[R, R]: g_rᵀ H⁻¹ g_s of the target's gradients; NaN where r and s are not in one scope."""
    skipped: dict[int, str] = field(default_factory=dict)
    """Groups that have no scores: id → constant_reward, not_captured, non_finite or other_rank."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Counters and timings, named as in the logs."""
    meta: dict[str, Any] = field(default_factory=dict)
    """What the scores are: step, target, geometry, credit, and where the optimizer's second moment came from."""
    warnings: list[str] = field(default_factory=list)
    """What a reader of the scores should be told."""
    credit: str = "position"
    config: InfluenceConfig = field(default_factory=InfluenceConfig)
    """The knobs that they were taken with."""
    _pairwise: dict[int, tuple[list[int], Tensor]] = field(default_factory=dict)

    @property
    def token_scores(self) -> list[Tensor]:
        """R × [T_r], in the order of the tokens: by loss term with credit='loss_term', else by position."""
        by_term = self.loss_term_scores if self.credit == "loss_term" else None
        return self.position_scores if by_term is None else by_term

    def without_step(self, response: int) -> Tensor:
        """bool[T_r]: tokens whose step is exactly zero, as that of a clipped token is: training passes over them."""
        return self.token_scores[response] == 0.0

    @property
    def pairwise(self) -> list[Tensor]:
        """R × [T_r, R]: the effect of each token's step on each response's target, by position; NaN outside its
        scope, and with credit='loss_term'."""
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
    factors: Mapping[int, float],
    labels: Labels,
    loss_terms: Mapping[int, Tensor],
    config: InfluenceConfig,
) -> InfluenceTrace:
    """The scores of all scopes, back in the order of the responses. `lengths`: tokens of this rank's responses;
    `factors`: target over step gradient of those for which one pass was both."""
    responses = len(labels)
    like = next((batch.kernel for batch in batches if batch.kernel is not None), torch.zeros(0))
    position, by_term = ([like.new_empty(0)] * responses for _ in range(2))
    rest = like.new_zeros(responses)
    kernel = like.new_full((responses, responses), torch.nan)
    pairwise: dict[int, tuple[list[int], Tensor]] = {}
    totals = Totals()
    for batch in batches:
        if batch.kernel is None or batch.position is None:
            continue
        scored = [index for index, counts in enumerate(batch.tokens) if counts]
        if not scored:
            continue
        of_tokens = batch.totals()[scored]
        members = torch.tensor([batch.scopes[index].members for index in scored])  # [S, n]
        tokens_of = torch.tensor([[lengths.get(r, 0) for r in own] for own in members.tolist()])
        kernel[members[:, :, None], members[:, None, :]] = batch.kernel[scored]
        turning = torch.tensor([[factors.get(r, 0.0) for r in own] for own in members.tolist()], dtype=torch.float64)
        signed = torch.ones(members.shape) if labels.sign is None else labels.sign[members]
        # Of response r as a whole, by linearity: what all its positions together do to the contrast.
        through = (batch.kernel * batch.contrast.to(batch.kernel)).sum(2)[scored]
        turned = torch.where(turning == 0, torch.nan, signed / turning).to(like)
        rest[members] = torch.where((tokens_of > 0).to(like.device), turned * through - of_tokens, 0.0)
        seen_by_another = batch.contrast[scored].roll(1, 1).diagonal(dim1=1, dim2=2)
        totals.add(of_tokens + rest[members], seen_by_another, tokens_of, signed * turning)
        for index in scored:
            counts, members_of_scope = batch.tokens[index], batch.scopes[index].members
            tokens = list(counts.values())
            parts = batch.position[index, : sum(tokens)].split(tokens)
            for response, part in zip(counts, parts, strict=True):
                position[response] = padded(part, lengths[response])
                if response in loss_terms:
                    by_term[response] = loss_terms[response]
            if batch.pairwise is not None:
                blocks = batch.pairwise[index, : sum(tokens)].split(tokens)
                pairwise |= {r: (members_of_scope, block) for r, block in zip(counts, blocks, strict=True)}
    trace = InfluenceTrace(
        position_scores=position,
        loss_term_scores=by_term if config.wants_loss_term else None,
        rest_scores=rest,
        response_kernel=kernel,
        credit=config.credit,
        config=config,
        _pairwise=pairwise,
    )
    totals.judge(trace)
    return trace


def padded(scores: Tensor, length: int) -> Tensor:
    """[length]: NaN for the tokens past the cap, which were not captured."""
    if len(scores) == length:
        return scores
    return torch.nn.functional.pad(scores, (0, length - len(scores)), value=torch.nan)


class Totals:
    """Do the responses' total scores say more than their labels and lengths?"""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []
        self.values: list[Tensor] = []

    def add(self, totals: Tensor, weights: Tensor, lengths: Tensor, factors: Tensor) -> None:
        """Some responses: their totals, their weights in the contrast, their tokens (none: of another rank, left out),
        and target over step gradient."""
        label = weights * lengths
        turned = torch.where(factors == 0, 0.0, label / (factors * lengths))
        here = lengths > 0
        self.rows.append(torch.stack([torch.ones_like(label), label, turned], -1)[here])
        self.values.append(totals.double().cpu()[here])

    def label_r2(self) -> float | None:
        """The share of the totals' variance that label · length and label · weight of the step explain."""
        if sum(map(len, self.values)) < 8:
            return None
        features, values = torch.cat(self.rows), torch.cat(self.values)
        if not bool(torch.isfinite(values).all()) or float(values.var()) == 0.0:
            return None
        features = features / features.abs().amax(0).clamp(min=1e-300)
        fitted = features @ torch.linalg.lstsq(features, values[:, None], driver="gelsd").solution
        return float(1 - (values - fitted[:, 0]).square().sum() / (values - values.mean()).square().sum())

    def judge(self, trace: InfluenceTrace) -> None:
        found = self.label_r2()
        if found is None:
            return
        trace.metrics["influence_trace/label_r2"] = found
        if found > LABELS_ALONE and trace.config.hessian_mode == "inverse":  # elsewhere it is so, and nothing is wrong
            trace.warnings.append(
                f"labels and lengths explain {found:.1%} of the responses' total scores: the scores repeat whether a"
                " response was accepted. With hessian_mode=inverse raise reg_scale, or use hessian_mode=optimizer"
            )


def counters(batches: list[ScopeBatch], labels: Labels, skipped: Mapping[int, str]) -> dict[str, float]:
    """What was scored and what was not, under the names of the logs."""
    mixed, total = len(labels.mixed_groups), len(labels.groups)
    scored = [
        (scope, counts) for batch in batches for scope, counts in zip(batch.scopes, batch.tokens, strict=True) if counts
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
    if any(batch.degrees for batch in batches):
        metrics["influence_trace/effective_dof"] = mean_degrees(batches)
    return {name: float(value) for name, value in metrics.items()}


def mean_degrees(batches: list[ScopeBatch]) -> float:
    """The mean over modules and responses: a scope that lies on several ranks is solved on each of them, and counts
    there by the responses that the rank has."""
    values, weights = [], []
    for batch in batches:
        responses = torch.tensor([len(counts) for counts in batch.tokens], dtype=torch.float64)
        for of_modules in batch.degrees:  # [M·S]
            values.append(of_modules.double().cpu())
            weights.append(responses.repeat(len(of_modules) // len(responses)))
    weight = torch.cat(weights)
    return float(torch.cat(values) @ weight / weight.sum().clamp(min=1))
