"""How much memory a trace will need, from sizes alone."""

from __future__ import annotations

from dataclasses import dataclass

from gradtrace.attribution.config import InfluenceConfig
from gradtrace.attribution.factors.modules import Block

MAX_WAITING_ELEMENTS = 2**21
"""Modules of one kind wait for each other, up to this many numbers in their factors (8 MB), and are scored together:
scoring a small module alone is mostly overhead."""


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
    """Directions kept for loss-term credit, of at least one group (of `loss_term_prompts` if that is set)."""
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
    scored = [block for block in blocks if block.scored or config.hessian_mode == "inverse"]
    per_block = [tokens * (block.k_out + block.k_in) + responses * block.dim for block in scored] or [0]
    streamed = whole_groups and config.scope == "per_prompt"
    solving = 0
    if config.hessian_mode == "inverse" and config.solver == "dense":
        solving = 2 * max(block.dim for block in scored) ** 2
    elif config.hessian_mode == "inverse" and config.hessian_source == "token":
        solving = max(min(tokens**2, block.dim**2, 3 * responses * block.dim) for block in scored)
    directions = 0
    if config.wants_loss_term:
        each = responses if config.exclude_self_response else max(config.loss_term_prompts, 1)
        directions = each * sum(block.dim for block in blocks)
    return MemoryEstimate(
        stored_factors=0 if streamed else 4 * sum(per_block),
        working=4 * max(max(per_block) + solving, min(sum(per_block), MAX_WAITING_ELEMENTS) if streamed else 0),
        scores=4 * (tokens * (1 + (responses if config.pairwise else 0)) + responses**2),
        directions=4 * directions,
        projections=4 * sum(b.k_out * b.d_out + b.k_in * b.d_in for b in blocks if b.projected),
    )
