"""What `InfluenceTracer.score` returns."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

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
    """[R, R]: g_rᵀ H⁻¹ g_s; NaN where r and s are not in one scope."""
    skipped: dict[int, str]
    """Groups that have no scores: id → constant_reward, not_captured, non_finite or other_rank."""
    metrics: dict[str, float]
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
        """R × [T_r, R]: the effect of each token on each response (position credit); NaN outside its scope."""
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
