"""One captured pass: which scopes it holds whole, and what becomes of every module's factors.

Scopes that the pass holds whole are scored inside it, and nothing of them is kept; of the others, each module keeps
what `score` will need. Small modules of like shape wait for each other and are scored together: alone, they are mostly
overhead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradtrace.attribution.collectives import Ranks
from gradtrace.attribution.config import InfluenceConfig
from gradtrace.attribution.factors.capture import Capture, Part
from gradtrace.attribution.factors.captured import Role, Takes
from gradtrace.attribution.factors.hooks import full_precision, sides
from gradtrace.attribution.factors.labels import Labels
from gradtrace.attribution.factors.loss_terms import LossTerms
from gradtrace.attribution.factors.memory import MAX_WAITING_ELEMENTS
from gradtrace.attribution.factors.modules import Block, Site, by_block
from gradtrace.attribution.factors.scopes import Scope, ScopeBatch, batches_of
from gradtrace.attribution.factors.solvers import TokenRows
from gradtrace.attribution.factors.store import Store, padded, scaled
from gradtrace.attribution.factors.timing import Timing


@dataclass(frozen=True, eq=False)
class Receivers:
    """Where the parts of a pass go."""

    store: Store
    loss_terms: LossTerms
    timing: Timing


class OnePass:
    def __init__(
        self,
        capture: Capture,
        role: Role,
        factors: Mapping[int, float],
        config: InfluenceConfig,
        receivers: Receivers,
        labels: Labels | None,
        scopes: Sequence[Scope],
        targets: set[int],
        takes: Takes = "all",
    ) -> None:
        """`factors`: response → what turns its captured gradient into that of its target. `targets`: responses whose
        target had a pass before this one. `labels` are None, and there are no `scopes`, where `score` brings them."""
        self.capture = capture
        self.role = role
        self.factors = factors
        self.config = config
        self.to = receivers
        self.labels = labels
        self.scopes = scopes
        self.takes = takes
        self._waiting: dict[tuple[object, ...], list[Block]] = {}
        self._plan(targets)

    def _plan(self, targets: set[int]) -> None:
        """Which scopes this micro-batch holds whole (scored inside the pass), and which responses to store."""
        layout, config = self.capture.layout, self.config
        present = set(layout.responses)
        known = {"both": present, "step": targets, "target": set()}[self.role]
        held = [s for s in self.scopes if present.issuperset(s.members) and known.issuperset(s.members)]
        if self.takes == "directions":
            held = []
        captured = {response: config.captured(count) for response, count in layout.token_counts.items()}
        self.whole: list[ScopeBatch] = batches_of(held, layout.token_counts, captured, config)
        limit = config.max_tokens_per_response
        self._positions = [
            padded(
                [torch.cat([layout.tokens_of(r, limit) for r in scope.members]) for scope in batch.scopes],
                batch.width,
            )
            for batch in self.whole
        ]
        scored = {response for scope in held for response in scope.members}
        self._scored_responses = len(scored)
        wanted = present if self.labels is None else {r for scope in self.scopes for r in scope.members}
        self._to_store = [] if self.takes == "directions" else sorted((present & wanted) - scored)
        self._directed: list[tuple[Scope, dict[int, Tensor]]] = []
        if self.role != "step" and config.hessian_mode != "inverse" and self.takes != "scores":
            self._directed = [
                (scope, self._direction_weights(scope))
                for scope in self.scopes
                if scope.has_loss_terms and present.intersection(scope.members)
            ]
        if self._directed:
            self.capture.direct({r for scope, _ in self._directed for r in scope.members})

    def _direction_weights(self, scope: Scope) -> dict[int, Tensor]:
        """Member → [m]: how what was captured of it counts in the scope's directions. A pass for directions alone is of
        the contrast already."""
        if self.takes == "directions":
            return {r: torch.ones(1, dtype=torch.float64) for r in scope.members if r in self.factors}
        return self.to.loss_terms.weights(scope, self._signed(scope.members))

    def _signed(self, members: list[int]) -> dict[int, float]:
        assert self.labels is not None
        return {r: self.labels.sign_of(r) * self.factors[r] for r in members if r in self.factors}

    def wants(self, block: Block) -> bool:
        """Whether anything of this module is needed: a module outside the tail only serves loss terms."""
        if self.takes == "directions":
            return bool(self._directed)
        if block.scored or self.labels is None or self._directed:
            return True
        return self.config.hessian_mode == "inverse" and any(scope.has_loss_terms for scope in self.scopes)

    def receive(self, block: Block, site: Site, gradient: Tensor, x: Tensor, is_last: bool) -> None:
        """One call of a module inside the backward pass, and whether nothing more will come for it."""
        # The pass may run under autocast; factors are never rounded to half precision.
        with torch.no_grad(), full_precision(gradient.device.type):
            with self.to.timing("project", gradient):
                gradient, x, positions = self.capture.wanted(site, gradient, x, block.scored)
                self.capture.add(block, *sides(block, site, gradient, x), positions)
            if is_last:
                self._complete(block)

    def finish(self) -> None:
        """The backward pass is over: score and store what is complete."""
        parts = self.capture.parts
        if not parts:
            return
        device = next(iter(parts.values()))[0].u.device.type
        with torch.no_grad(), full_precision(device):
            waiting = {block for kind in self._waiting.values() for block in kind}
            for block in [block for block in parts if block not in waiting]:
                self._complete(block)
            for blocks in self._waiting.values():
                self._score(blocks)

    def _complete(self, block: Block) -> None:
        """All factors of this module are here. It waits for others of its kind, as far as memory allows."""
        parts = self.capture.parts[block]
        waiting = self._waiting.setdefault(self.capture.kind(block), [])
        waiting.append(block)
        size = self._scored_responses * block.dim + sum(part.u.numel() + part.v.numel() for part in parts)
        # Curvature of tokens takes T×T numbers for each module: those do not wait.
        alone = self.config.hessian_mode == "inverse" and self.config.hessian_source == "token"
        if alone or (len(waiting) + 1) * size > MAX_WAITING_ELEMENTS:
            self._score(waiting)

    def _score(self, waiting: list[Block]) -> None:
        """Modules of one kind: score the scopes that are whole, store the rest."""
        blocks, timing = list(waiting), self.to.timing
        waiting.clear()
        if not blocks:
            return
        calls = self.capture.take(blocks)
        some, first = calls[0].u, blocks[0]
        for scope, weights in self._directed:
            with timing("gradients", some):
                self.to.loss_terms.add(scope, blocks, self.capture.combined(calls, weights))
        for batch, positions in zip(self.whole, self._positions, strict=True):
            if not (first.scored or batch.directed):
                continue
            if self.role == "both" and len(calls) == 1 and batch.takes_products(first, self.capture):
                with timing("solve", some):
                    factors = [self._signed(scope.members) for scope in batch.scopes]
                    of_scopes = zip(factors, positions, strict=True)
                    batch.add_products(blocks, [self.capture.products(calls, *scope) for scope in of_scopes])
                continue
            with timing("gradients", some):
                gradients = self._gradients(blocks, calls, batch.members)
                u, v = (side.flatten(0, 1).flatten(1, 2) for side in self.capture.tokens(calls, positions))
            with timing("solve", some):
                rows = TokenRows(u, v, batch.width)
                batch.add(blocks, gradients.unflatten(1, (len(batch.scopes), -1)), rows, Ranks())
        if self._to_store:
            self._keep(blocks, calls)

    def _gradients(self, blocks: list[Block], calls: list[Part], members: list[int]) -> Tensor:
        """[M, len(members), k_out, k_in]: gradients of targets that this pass, or one before it, holds."""
        if self.role == "step":
            assert self.labels is not None
            found = calls[0].u.new_zeros(len(blocks), len(members), calls[0].u.shape[-1], calls[0].v.shape[-1])
            for block, own in by_block(blocks, found).items():
                own.copy_(self.to.store.gradients(block, members))
            for block in blocks:
                for response in members:
                    self.to.store.targets[block].pop(response, None)
            return turned(found, members, self.labels)
        return scaled(self.capture.gradients(calls, members), list(self._signed(members).values()))

    def _keep(self, blocks: list[Block], calls: list[Part]) -> None:
        """Store what a later pass or `score` will need of responses whose group is not whole here."""
        inverse = self.config.hessian_mode == "inverse"
        responses = self._to_store
        if not blocks[0].scored and self.labels is not None:
            chosen = {r for s in self.scopes if s.has_loss_terms for r in s.members} if inverse else set()
            responses = [r for r in responses if r in chosen]
        factors = {r: self.factors[r] for r in responses}
        step = self.role != "target" and (blocks[0].scored or inverse)
        self.to.store.keep(blocks, self.capture, calls, factors, target=self.role != "step", step=step)


def turned(gradients: Tensor, members: list[int], labels: Labels) -> Tensor:
    """Gradients [.., n, k_out, k_in] by the sign of each response, which may be known at `score` only."""
    if labels.sign is None:
        return gradients
    return scaled(gradients, [labels.sign_of(r) for r in members])
