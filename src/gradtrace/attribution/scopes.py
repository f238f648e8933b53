"""Scopes: the sets of responses that are contrasted with each other, and the scores that build up in each."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradtrace.attribution.collectives import Ranks
from gradtrace.attribution.config import InfluenceConfig
from gradtrace.attribution.contrast import contrast
from gradtrace.attribution.errors import AttributionError
from gradtrace.attribution.modules import Block
from gradtrace.attribution.solvers import TokenRows, make_curvature


@dataclass(frozen=True)
class Labels:
    """What is known of all R responses: the same on every rank."""

    accepted: Tensor
    """bool[R]"""
    group: Tensor
    """long[R]"""
    advantages: Tensor | None = None
    """float[R]"""

    @staticmethod
    def of(accepted: Tensor, group: Tensor, advantages: Tensor | None) -> Labels:
        accepted, group = accepted.cpu(), group.cpu()
        if accepted.dtype != torch.bool or accepted.dim() != 1:
            raise AttributionError(f"accepted must be bool[R], not {accepted.dtype}{list(accepted.shape)}")
        if group.shape != accepted.shape or group.is_floating_point():
            raise AttributionError(
                f"group must be long[{len(accepted)}] like accepted, not {group.dtype}{list(group.shape)}"
            )
        if advantages is not None:
            advantages = advantages.detach().cpu()
            if advantages.shape != accepted.shape:
                raise AttributionError(
                    f"advantages is {list(advantages.shape)}, but there are {len(accepted)} responses"
                )
        return Labels(accepted, group, advantages)

    def __len__(self) -> int:
        return len(self.accepted)

    def same_as(self, other: Labels) -> bool:
        def equal(a: Tensor | None, b: Tensor | None) -> bool:
            return (a is None) == (b is None) and (a is None or b is None or torch.equal(a, b))

        return (
            equal(self.accepted, other.accepted)
            and equal(self.group, other.group)
            and equal(self.advantages, other.advantages)
        )

    def mixed_groups(self) -> dict[int, list[int]]:
        """Groups that hold accepted *and* rejected responses: id → responses."""
        members = self.groups()
        return {g: rs for g, rs in members.items() if 0 < int(self.accepted[rs].sum()) < len(rs)}

    def groups(self) -> dict[int, list[int]]:
        members: dict[int, list[int]] = {}
        for response, group in enumerate(self.group.tolist()):
            if group >= 0:
                members.setdefault(group, []).append(response)
        return members


@dataclass(eq=False)
class Scope:
    """Responses that are scored against each other, and what has been added up over the modules so far."""

    groups: list[int]
    members: list[int]
    contrast: Tensor
    """float64[n, n], see `contrast`."""
    config: InfluenceConfig
    finite: list[tuple[str, Tensor]] = field(default_factory=list)
    """(module, bool[n]): whether each response's gradient was finite there."""
    local: list[int] = field(default_factory=list)
    """Members whose tokens are on this rank, in the order their tokens stand in `position`."""
    position: Tensor | None = None
    """[T]: position-credit scores of the captured tokens of `local`."""
    pairwise: Tensor | None = None
    """[T, n]"""
    kernel: Tensor | None = None
    """[n, n]: M_r · H⁻¹ M_s"""
    directions: dict[Block, Tensor] = field(default_factory=dict)
    """Per module [1 or n, k_out, k_in]: the direction whose product with a token's gradient is its score."""
    solvers: dict[str, int] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return self.kernel is not None

    def add(
        self, block: Block, gradients: Tensor, rows: TokenRows, local: list[int], owner: Tensor, ranks: Ranks
    ) -> None:
        """One module's part. `gradients` [n, …] of all members, reduced; `owner` long[T]: member of each token."""
        config = self.config
        per_member = config.pairwise or config.exclude_self_response
        members = len(self.members)
        curvature = make_curvature(
            gradients,
            rows,
            mode=config.hessian_mode,
            source=config.hessian_source,
            solver=config.solver,
            reg_lambda=config.reg_lambda,
            columns=members,
            ranks=ranks,
        )
        weights = self.contrast.to(gradients)
        if per_member:
            everything = torch.eye(members, dtype=gradients.dtype, device=gradients.device)
            pairwise = curvature.token_scores(everything)
            scores = (pairwise * weights[owner.to(weights.device)]).sum(1)
            if config.pairwise:
                self.pairwise = pairwise if self.pairwise is None else self.pairwise + pairwise
        else:
            scores = curvature.token_scores(weights[:1]).squeeze(1)
        kernel = curvature.kernel()
        self.local = local
        self.position = scores if self.position is None else self.position + scores
        self.kernel = kernel if self.kernel is None else self.kernel + kernel
        if config.wants_loss_term:
            distinct = weights if config.exclude_self_response else weights[:1]
            self.directions[block] = curvature.directions(distinct)
        # Of the sum, not of every entry: one pass, and no wait for the device until the end.
        self.finite.append((block.name, torch.isfinite(gradients.flatten(1).sum(1))))
        self.solvers[curvature.name] = self.solvers.get(curvature.name, 0) + 1

    def non_finite(self) -> tuple[str, list[int]] | None:
        """The first module (in the order of the backward pass) with a bad gradient, and the responses."""
        for module, finite in self.finite:
            bad = [self.members[i] for i in (~finite).nonzero().squeeze(-1).tolist()]
            if bad:
                return module, bad
        return None


def build_scopes(labels: Labels, config: InfluenceConfig) -> tuple[list[Scope], dict[int, str]]:
    """Scopes of the mixed groups, and for every other group the reason why it has none."""
    mixed = labels.mixed_groups()
    skipped = {group: "constant_reward" for group in labels.groups() if group not in mixed}

    def scope(groups: list[int]) -> Scope:
        members = [response for group in groups for response in mixed[group]]
        advantages = None if labels.advantages is None else labels.advantages[members]
        weights = contrast(
            labels.accepted[members], config.contrastive_agg, config.exclude_self_response, advantages
        )
        return Scope(groups, members, weights, config)

    if not mixed:
        return [], skipped
    if config.accepted_rejected_scope == "all_selected":
        return [scope(list(mixed))], skipped
    return [scope([group]) for group in mixed], skipped
