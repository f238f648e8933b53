"""What becomes of every module's factors inside a captured pass.

Scopes that the pass holds whole are scored inside it, and nothing of them is kept; of the others, each module keeps
what `score` will need. Small modules of like shape wait for each other and are scored together: alone, they are mostly
overhead.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from gradtrace.attribution.collectives import Ranks
from gradtrace.attribution.config import InfluenceConfig
from gradtrace.attribution.factors.capture import Capture, Part
from gradtrace.attribution.factors.layers import Block, Site, by_block, full_precision, sides
from gradtrace.attribution.factors.scopes import Labels, Scope, ScopeBatch, batches_of
from gradtrace.attribution.factors.solvers import TokenRows

MAX_WAITING_ELEMENTS = 2**21
"""Modules of one kind wait for each other, up to this many numbers in their factors (8 MB), and are scored together:
scoring a small module alone is mostly overhead."""


class Timing:
    def __init__(self, enabled: bool) -> None:
        """Timing makes a GPU wait at the end of each phase, so it is off unless `profile_timing` asks for it."""
        self.enabled = enabled
        self.seconds: dict[str, float] = {}
        """timing_s/influence_NAME → seconds."""

    def __call__(self, name: str, tensor: Tensor) -> AbstractContextManager[None]:
        """Adds up the time of what happens inside; `tensor` says on which device."""
        return self._timed(name, tensor) if self.enabled else nullcontext()

    @contextmanager
    def _timed(self, name: str, tensor: Tensor) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        key = f"timing_s/influence_{name}"
        self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - started


class OnePass:
    def __init__(
        self,
        capture: Capture,
        config: InfluenceConfig,
        store: Store,
        timing: Timing,
        labels: Labels | None,
        scopes: Sequence[Scope],
        targets: set[int],
    ) -> None:
        """`targets`: responses whose target had a pass before this one. `labels` are None, and there are no `scopes`,
        where `score` brings them."""
        self.capture = capture
        self.config = config
        self.store = store
        self.timing = timing
        self.labels = labels
        self._waiting: dict[tuple[object, ...], list[Block]] = {}
        layout = capture.layout
        present = set(layout.responses)
        known = {"both": present, "step": targets, "target": set()}[capture.role]
        held = [s for s in scopes if present.issuperset(s.members) and known.issuperset(s.members)]
        captured = {response: config.captured(count) for response, count in layout.token_counts.items()}
        self.whole: list[ScopeBatch] = batches_of(held, layout.token_counts, captured, config)
        """Scopes that this micro-batch holds whole, which are scored inside the pass."""
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
        wanted = present if labels is None else {r for scope in scopes for r in scope.members}
        self._to_store = sorted((present & wanted) - scored)

    def _signed(self, members: list[int]) -> dict[int, float]:
        assert self.labels is not None
        return {r: self.labels.sign_of(r) * self.capture.factors[r] for r in members}

    def receive(self, block: Block, site: Site, gradient: Tensor, x: Tensor, is_last: bool) -> None:
        """One call of a module inside the backward pass, and whether nothing more will come for it."""
        # The pass may run under autocast; factors are never rounded to half precision.
        with torch.no_grad(), full_precision(gradient.device.type):
            with self.timing("project", gradient):
                gradient, x, positions = self.capture.wanted(site, gradient, x)
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
        blocks = list(waiting)
        waiting.clear()
        if not blocks:
            return
        calls = self.capture.take(blocks)
        some = calls[0].u
        for batch, positions in zip(self.whole, self._positions, strict=True):
            if self.capture.role == "both" and len(calls) == 1 and batch.takes_products(blocks[0], self.capture):
                with self.timing("solve", some):
                    factors = [self._signed(scope.members) for scope in batch.scopes]
                    of_scopes = zip(factors, positions, strict=True)
                    batch.add_products(blocks, [self.capture.products(calls, *scope) for scope in of_scopes])
                continue
            with self.timing("gradients", some):
                gradients = self._gradients(blocks, calls, batch.members)
                u, v = (side.flatten(0, 1).flatten(1, 2) for side in self.capture.tokens(calls, positions))
            with self.timing("solve", some):
                rows = TokenRows(u, v, batch.width)
                batch.add(blocks, gradients.unflatten(1, (len(batch.scopes), -1)), rows, Ranks())
        if self._to_store:
            self.store.keep(blocks, self.capture, calls, self._to_store)

    def _gradients(self, blocks: list[Block], calls: list[Part], members: list[int]) -> Tensor:
        """[M, len(members), k_out, k_in]: gradients of targets that this pass, or one before it, holds."""
        if self.capture.role == "step":
            assert self.labels is not None
            found = calls[0].u.new_zeros(len(blocks), len(members), calls[0].u.shape[-1], calls[0].v.shape[-1])
            for block, own in by_block(blocks, found).items():
                own.copy_(self.store.gradients(block, members))
            for block in blocks:
                for response in members:
                    self.store.targets[block].pop(response, None)
            return turned(found, members, self.labels)
        return scaled(self.capture.gradients(calls, members), list(self._signed(members).values()))


# ---------------------------------------------------------------- what waits for the rest of its group


class Store:
    """What waits for the rest of its group, by module and response."""

    def __init__(self, blocks: list[Block], config: InfluenceConfig) -> None:
        self.blocks = blocks
        self.config = config
        self.targets: dict[Block, dict[int, Tensor]] = {block: {} for block in blocks}
        """Gradients of targets [k_out, k_in], without a sign."""
        self.tokens: dict[Block, dict[int, TokenFactors]] = {block: {} for block in blocks}

    def keep(self, blocks: Sequence[Block], capture: Capture, calls: Sequence[Part], responses: list[int]) -> None:
        """Of these responses, in modules of one kind: gradients of their targets, and factors of their tokens."""
        some = calls[0].u
        where = torch.device("cpu") if self.config.grad_offload_to_cpu else some.device
        if capture.role != "step":
            factors = [capture.factors[r] for r in responses]
            gradients = scaled(capture.gradients(calls, responses), factors).to(where)
            for block, own in by_block(blocks, gradients).items():
                self.targets[block] |= zip(responses, own, strict=True)
        if capture.role != "target":
            for response in responses:
                flat = capture.layout.tokens_of(response, self.config.max_tokens_per_response)[None]
                sides = (side[:, 0].to(where) for side in capture.tokens(calls, flat))
                for block, u, v in zip(blocks, *sides, strict=True):
                    self.tokens[block][response] = TokenFactors(u[..., : block.k_out], v[..., : block.k_in])

    def gradients(self, block: Block, members: list[int]) -> Tensor:
        """[len(members), k_out, k_in]; zero for those of other ranks, and where the module had no gradient."""
        gradients = block.zeros(len(members), self.config)
        for index, response in enumerate(members):
            if response in self.targets[block]:
                gradients[index] = self.targets[block][response]
        return gradients


def scaled(gradients: Tensor, factors: list[float]) -> Tensor:
    """Each of [.., n, k_out, k_in] times its factor."""
    return gradients * torch.tensor(factors, dtype=gradients.dtype, device=gradients.device)[:, None, None]


@dataclass(eq=False)
class TokenFactors:
    """Factors of one response's captured tokens in one module, waiting for the rest of its group."""

    u: Tensor
    """[P, T_r, k_out], for each of the module's P calls."""
    v: Tensor
    """[P, T_r, k_in]"""


def join(stored: list[list[tuple[TokenFactors | None, int]]], width: int, like: Tensor) -> TokenRows:
    """Per scope the factors and token counts of its responses, as one table padded to `width` tokens.

    None stands for a response in whose pass the module received no gradient. `like` [.., k_out, k_in] gives
    sizes, type and device.
    """
    k_out, k_in = like.shape[-2:]
    present = [factors for scope in stored for factors, _ in scope if factors is not None]
    calls = max((len(factors.u) for factors in present), default=1)
    u = like.new_zeros(len(stored), calls, width, k_out)
    v = like.new_zeros(len(stored), calls, width, k_in)
    for index, scope in enumerate(stored):
        start = 0
        for factors, count in scope:
            if factors is not None:
                u[index, : len(factors.u), start : start + count] = factors.u
                v[index, : len(factors.v), start : start + count] = factors.v
            start += count
    return TokenRows(u.flatten(1, 2), v.flatten(1, 2), width)


def padded(lists: list[Tensor], width: int) -> Tensor:
    """long[S, width] from S lists of positions; −1 where there is none."""
    table = torch.full((len(lists), width), -1, dtype=torch.long)
    for row, values in enumerate(lists):
        table[row, : len(values)] = values
    return table


def turned(gradients: Tensor, members: list[int], labels: Labels) -> Tensor:
    """Gradients [.., n, k_out, k_in] by the sign of each response, which may be known at `score` only."""
    if labels.sign is None:
        return gradients
    return scaled(gradients, [labels.sign_of(r) for r in members])


# ---------------------------------------------------------------- memory


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes in float32."""

    stored_factors: int
    """Kept from the backward pass to `score()`; 0 where groups are scored inside it."""
    working: int
    """The largest single module while it is being scored, or the small ones that wait to be scored together."""
    scores: int
    """Token scores, pairwise scores and the response kernel."""
    directions: int
    """Those of loss-term credit, one for each group, or for each response that leaves itself out."""
    projections: int
    """The random matrices."""

    @property
    def total(self) -> int:
        return self.stored_factors + self.working + self.scores + self.directions + self.projections


def estimate_memory(
    blocks: list[Block], config: InfluenceConfig, responses: int, tokens: int, whole_groups: bool
) -> MemoryEstimate:
    """For `responses` responses with `tokens` tokens in all. `whole_groups`: micro-batches hold whole groups and
    the contrast is known at capture, so that nothing is stored."""
    if config.max_tokens_per_response:
        tokens = min(tokens, responses * config.max_tokens_per_response)
    per_block = [tokens * (block.k_out + block.k_in) + responses * block.dim for block in blocks] or [0]
    streamed = whole_groups and config.scope == "per_prompt"
    solving = 0
    if config.hessian_mode == "inverse" and config.solver == "dense":
        solving = 2 * max(block.dim for block in blocks) ** 2
    elif config.hessian_mode == "inverse" and config.hessian_source == "token":
        solving = max(min(tokens**2, block.dim**2, 3 * responses * block.dim) for block in blocks)
    each = 0  # directions: one for each group, or for each response that leaves itself out
    if config.wants_loss_term:
        each = responses if config.exclude_self_response else responses // 2
    return MemoryEstimate(
        stored_factors=0 if streamed else 4 * sum(per_block),
        working=4 * max(max(per_block) + solving, min(sum(per_block), MAX_WAITING_ELEMENTS) if streamed else 0),
        scores=4 * (tokens * (1 + (responses if config.pairwise else 0)) + responses**2),
        directions=4 * each * sum(block.dim for block in blocks),
        projections=4 * sum(b.k_out * b.d_out + b.k_in * b.d_in for b in blocks if b.projected),
    )
