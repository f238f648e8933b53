"""Loss-term credit: every token's own term, differentiated along the direction that its score is about.

One forward-mode pass per scope replaces one backward pass per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from gradtrace.attribution.errors import AttributionError
from gradtrace.attribution.scopes import ScopeBatch
from gradtrace.attribution.tangent import Method, directional_derivative

Terms = Callable[[list[int]], Tensor]
"""Responses → their tokens' terms w_t ℓ_t, one after the other: 1-D, summing to the captured objective."""


def loss_term_scores(
    batches: list[ScopeBatch], model: nn.Module, lengths: Mapping[int, int], terms: Terms, method: Method
) -> dict[int, Tensor]:
    """Response → [T_r]. Uses up the directions of the batches."""
    scores: dict[int, Tensor] = {}
    for batch in batches:
        for index, (scope, counts) in enumerate(zip(batch.scopes, batch.tokens, strict=True)):
            local = list(counts)
            if batch.config.exclude_self_response:  # every response has a direction of its own
                parts = [(scope.members.index(response), [response]) for response in local]
            else:
                parts = [(0, local)] if local else []
            for row, responses in parts:
                direction = {
                    block.parameter_name: block.weight_direction(found[index, row])
                    for block, found in batch.directions.items()
                }
                scores |= _terms_along(model, direction, responses, lengths, terms, method)
        batch.directions.clear()
    return scores


def _terms_along(
    model: nn.Module,
    direction: dict[str, Tensor],
    responses: list[int],
    lengths: Mapping[int, int],
    terms: Terms,
    method: Method,
) -> dict[int, Tensor]:
    values = directional_derivative(model, lambda: terms(responses), direction, method)
    counts = [lengths[response] for response in responses]
    if values.shape != (sum(counts),):
        raise AttributionError(
            f"terms({responses}) returned {list(values.shape)}; these responses have {sum(counts)} tokens, and it"
            " must return one term for each, in order, in one dimension"
        )
    return dict(zip(responses, values.split(counts), strict=True))
