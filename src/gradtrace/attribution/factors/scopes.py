"""Which responses are scored against each other, with which weights, and the scores that build up in each scope."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property

import torch
from torch import Tensor

from gradtrace.attribution.collectives import Ranks
from gradtrace.attribution.config import InfluenceConfig
from gradtrace.attribution.errors import AttributionError
from gradtrace.attribution.factors.capture import Capture
from gradtrace.attribution.factors.layers import Block, by_block
from gradtrace.attribution.factors.solvers import (
    Curvature,
    Damping,
    Identity,
    OptimizerGeometry,
    TokenRows,
    make_curvature,
)

MAX_BATCH_TOKENS = 4096
"""Small scopes are scored side by side, up to this many (padded) tokens; then matmuls fill the machine."""


@dataclass(frozen=True)
class Labels:
    """The same on every rank."""

    accepted: Tensor
    """bool[R]"""
    group: Tensor
    """long[R]; −1 = in no group"""
    advantages: Tensor | None = None
    """float[R]"""
    sign: Tensor | None = None
    """float[R] of ±1: with which sign the captured objective counts the response's log-prob; None = all +1."""

    @staticmethod
    def of(accepted: Tensor, group: Tensor, advantages: Tensor | None = None, sign: Tensor | None = None) -> Labels:
        accepted, group = accepted.cpu(), group.cpu()
        if accepted.dtype != torch.bool or accepted.dim() != 1:
            raise AttributionError(f"accepted must be bool[R], not {accepted.dtype}{list(accepted.shape)}")
        if group.shape != accepted.shape or group.is_floating_point():
            raise AttributionError(
                f"group must be long[{len(accepted)}] like accepted, not {group.dtype}{list(group.shape)}"
            )
        columns = {"advantages": advantages, "sign": sign}
        for name, column in columns.items():
            if column is not None:
                columns[name] = column.detach().cpu()
                if column.shape != accepted.shape:
                    raise AttributionError(f"{name} is {list(column.shape)}, but there are {len(accepted)} responses")
        if sign is not None and bool((sign.abs() != 1).any()):
            raise AttributionError("sign must hold +1 or −1 for every response (use +1 where the weight is 0)")
        return Labels(accepted, group, columns["advantages"], columns["sign"])

    def __len__(self) -> int:
        return len(self.accepted)

    def same_as(self, other: Labels) -> bool:
        pairs = [(getattr(self, field.name), getattr(other, field.name)) for field in fields(self)]
        return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)

    def sign_of(self, response: int) -> float:
        return 1.0 if self.sign is None else float(self.sign[response])

    @cached_property
    def groups(self) -> dict[int, list[int]]:
        """Group id → its responses."""
        members: dict[int, list[int]] = {}
        for response, group in enumerate(self.group.tolist()):
            if group >= 0:
                members.setdefault(group, []).append(response)
        return members

    @cached_property
    def mixed_groups(self) -> dict[int, list[int]]:
        """Groups that hold accepted *and* rejected responses."""
        accepted = self.accepted.tolist()
        return {g: rs for g, rs in self.groups.items() if 0 < sum(accepted[r] for r in rs) < len(rs)}


def contrast(accepted: Tensor, agg: str, exclude_self: bool, advantages: Tensor | None = None) -> Tensor:
    """[n, n]: row o holds the weights c_r of the responses in the score of a token that belongs to response o.

    Without `exclude_self` all rows are equal. With it the own response has weight 0 and, for `mean`, the
    means run over those that remain; a side on which none remains has no part in the score.
    """
    members = len(accepted)
    if agg == "mean" and not exclude_self:  # numbers, not tensors: for a few responses these take ten times as long
        labels = accepted.bool().tolist()
        share = {True: 1.0 / max(labels.count(True), 1), False: -1.0 / max(labels.count(False), 1)}
        return torch.tensor([share[label] for label in labels], dtype=torch.float64).expand(members, -1)
    accepted = accepted.bool()
    present = torch.ones(members, members, dtype=torch.float64)
    if exclude_self:
        present.fill_diagonal_(0.0)
    if agg == "advantage":
        if advantages is None:
            raise AttributionError("contrastive_agg='advantage' needs advantages: pass them to capture() or score()")
        return present * advantages.double()[None, :]
    positive = present * accepted.double()[None, :]
    negative = present * (~accepted).double()[None, :]
    if agg == "mean":
        positive = positive / positive.sum(1, keepdim=True).clamp(min=1.0)
        negative = negative / negative.sum(1, keepdim=True).clamp(min=1.0)
    return positive - negative


@dataclass(eq=False)
class Scope:
    """Responses that are scored against each other."""

    groups: list[int]
    members: list[int]
    contrast: Tensor
    """float64[n, n], see `contrast`."""


def build_scopes(labels: Labels, config: InfluenceConfig) -> tuple[list[Scope], dict[int, str]]:
    """Scopes of the mixed groups, and for every other group the reason why it has none."""
    mixed = labels.mixed_groups
    skipped = {group: "constant_reward" for group in labels.groups if group not in mixed}

    def scope(groups: list[int]) -> Scope:
        members = [response for group in groups for response in mixed[group]]
        advantages = None if labels.advantages is None else labels.advantages[members]
        weights = contrast(labels.accepted[members], config.contrastive_agg, config.exclude_self_response, advantages)
        return Scope(groups, members, weights)

    if mixed and config.scope == "all_selected":
        return [scope(list(mixed))], skipped
    return [scope([group]) for group in mixed], skipped


@dataclass(eq=False)
class ScopeBatch:
    """S scopes of n responses each, scored side by side; their scores, added up over the modules."""

    scopes: list[Scope]
    tokens: list[dict[int, int]]
    """Per scope: its members whose tokens are on this rank → how many of their tokens are captured, in order."""
    config: InfluenceConfig
    position: Tensor | None = None
    """[S, T]: position-credit scores."""
    pairwise: Tensor | None = None
    """[S, T, n]"""
    kernel: Tensor | None = None
    """[S, n, n]: M_r · H⁻¹ M_s"""
    directions: dict[Block, Tensor] = field(default_factory=dict)
    """Per module [S, 1 or n, k_out, k_in], where loss terms are wanted: the direction along which they are taken. With
    hessian_mode=optimizer without P, which is known better when they are."""
    finite: dict[str, Tensor] = field(default_factory=dict)
    """Per module bool[S, n]: whether each response's gradient was finite there."""
    solvers: dict[str, int] = field(default_factory=dict)
    degrees: list[Tensor] = field(default_factory=list)
    """[M·S] each: effective degrees of freedom."""

    def __post_init__(self) -> None:
        self._keeps_pairs = self.config.pairwise and self.config.credit != "loss_term"  # they are of position credit
        self.width = max(sum(counts.values()) for counts in self.tokens)
        self.contrast = torch.stack([scope.contrast for scope in self.scopes])
        owner = self._owner = self._owners()
        self._weight_of_owner = torch.gather(self.contrast, 1, owner[:, :, None].expand(-1, -1, self.contrast.shape[2]))

    def _owners(self) -> Tensor:
        """long[S, T]: the place in its scope of each token's response; 0 for padding."""
        places: list[int] = []
        numbers: list[int] = []
        for scope, counts in zip(self.scopes, self.tokens, strict=True):
            places += [*(scope.members.index(response) for response in counts), 0]
            numbers += [*counts.values(), self.width - sum(counts.values())]
        return torch.tensor(places).repeat_interleave(torch.tensor(numbers)).view(len(self.scopes), -1)

    @property
    def members(self) -> list[int]:
        return [response for scope in self.scopes for response in scope.members]

    def add(self, blocks: list[Block], gradients: Tensor, rows: TokenRows, ranks: Ranks) -> None:
        """The part of M modules of one kind. `gradients`: [M, S, n, k_out, k_in] of all members, reduced; `rows`:
        their tokens as M·S scopes. Modules are solved side by side, each with a curvature of its own."""
        config = self.config
        modules = (len(blocks), len(self.scopes))
        rows.real = torch.tensor([sum(counts.values()) for counts in self.tokens]).repeat(len(blocks))
        curvature = self._curvature(blocks, gradients.flatten(0, 1), rows, ranks)
        weights = self.contrast.to(gradients)
        weights_of_modules = weights.repeat(len(blocks), 1, 1)
        self._add_scores(curvature, weights_of_modules, modules)
        if config.wants_loss_term:
            wanted = weights_of_modules if config.exclude_self_response else weights_of_modules[:, :1]
            along = curvature.directions if config.hessian_mode == "inverse" else curvature.combine
            self.directions |= by_block(blocks, along(wanted).unflatten(0, modules))
        # Of the sum, not of every entry: one pass, and no wait for the device until the end.
        finite = torch.isfinite(gradients.sum((3, 4)))
        self.finite |= {block.name: found for block, found in zip(blocks, finite, strict=True)}
        self.solvers[curvature.name] = self.solvers.get(curvature.name, 0) + len(blocks) * len(self.scopes)
        degrees = curvature.effective_dof()
        if degrees is not None:
            self.degrees.append(degrees)

    def _curvature(self, blocks: list[Block], gradients: Tensor, rows: TokenRows, ranks: Ranks) -> Curvature:
        config = self.config
        if config.hessian_mode == "inverse":
            dims = torch.tensor([block.dim for block in blocks]).repeat_interleave(len(self.scopes))
            damping = Damping(config.reg_lambda, config.reg_rule, config.reg_scale, dims)
            return make_curvature(
                gradients,
                rows,
                source=config.hessian_source,
                solver=config.solver,
                damping=damping,
                ranks=ranks,
            )
        exact = [block.preconditioner for block in blocks if block.preconditioner is not None]
        if not exact:
            return Identity(gradients, rows)
        return OptimizerGeometry(gradients, rows, torch.stack(exact).repeat_interleave(len(self.scopes), 0))

    def _add_scores(self, curvature: Curvature, weights: Tensor, modules: tuple[int, int]) -> None:
        if self._keeps_pairs or self.config.exclude_self_response:
            pairwise = curvature.token_scores(torch.eye(weights.shape[1]).to(weights))
            pairwise = pairwise.unflatten(0, modules).sum(0)
            scores = self._of_pairs(pairwise)
        else:
            scores = curvature.token_scores(weights[:, :1]).squeeze(2).unflatten(0, modules).sum(0)
        self.position = added(self.position, scores)
        self.kernel = added(self.kernel, curvature.kernel().unflatten(0, modules).sum(0))

    def _of_pairs(self, pairwise: Tensor) -> Tensor:
        """[S, T]: scores from the effects [S, T, n] on each response, which are kept where they are wanted."""
        if self._keeps_pairs:
            self.pairwise = added(self.pairwise, pairwise)
        return (pairwise * self._weight_of_owner.to(pairwise)).sum(2)

    def takes_products(self, block: Block, capture: Capture) -> bool:
        """Whether inner products, with every response, are all that this module's scores are made of, and cheaper to
        have without the responses' gradients."""
        config = self.config
        plain = config.hessian_mode != "inverse" and block.preconditioner is None
        every = self._keeps_pairs or config.exclude_self_response
        return (
            plain
            and every
            and not config.wants_loss_term
            and capture.prefers_products(block, self.scopes[0].members, self.width)
        )

    def add_products(self, blocks: list[Block], found: list[tuple[Tensor, Tensor]]) -> None:
        """The part of M modules: of each scope the products [M, T, n] of tokens and responses, and [M, n, n] of
        responses."""
        pairwise, kernel = (torch.stack(parts, 1) for parts in zip(*found, strict=True))
        self.position = added(self.position, self._of_pairs(pairwise.sum(0)))
        self.kernel = added(self.kernel, kernel.sum(0))
        finite = torch.isfinite(kernel.diagonal(dim1=2, dim2=3))
        self.finite |= {block.name: own for block, own in zip(blocks, finite, strict=True)}
        self.solvers["identity"] = self.solvers.get("identity", 0) + len(blocks) * len(self.scopes)

    def totals(self) -> Tensor:
        """[S, n]: the position-credit scores of each response's captured tokens, added up."""
        assert self.position is not None
        # Tokens that are padding have a score of zero, so that it does not matter whose they are.
        sums = self.position.new_zeros(self.contrast.shape[:2])
        return sums.scatter_add_(1, self._owner.to(sums.device), self.position)

    def all_finite(self) -> bool:
        """Whether every gradient of every response was finite."""
        return not self.finite or bool(torch.stack(list(self.finite.values())).all())

    def non_finite(self, index: int) -> tuple[str, list[int]] | None:
        """Of one scope: the first module in the order of the backward pass with a bad gradient, and the responses."""
        for module, finite in self.finite.items():
            bad = (~finite[index]).nonzero().squeeze(-1).tolist()
            if bad:
                return module, [self.scopes[index].members[i] for i in bad]
        return None


def added(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total + part


def batches_of(
    scopes: list[Scope], lengths: Mapping[int, int], local: Mapping[int, int], config: InfluenceConfig
) -> list[ScopeBatch]:
    """Scopes of equal size side by side. `lengths`: tokens of every response; `local`: captured ones of this rank."""
    batches = []
    for size in sorted({len(scope.members) for scope in scopes}):
        chosen: list[Scope] = []
        longest = 0
        for scope in (s for s in scopes if len(s.members) == size):
            tokens = sum(lengths[response] for response in scope.members)
            if chosen and max(longest, tokens) * (len(chosen) + 1) > MAX_BATCH_TOKENS:
                batches.append(chosen)
                chosen, longest = [], 0
            chosen.append(scope)
            longest = max(longest, tokens)
        batches.append(chosen)
    return [
        ScopeBatch(chosen, [{r: local[r] for r in scope.members if r in local} for scope in chosen], config)
        for chosen in batches
    ]
