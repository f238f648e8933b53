"""Choosing one token per row from its logits, and the log-prob of that choice.

The distribution, exactly, and in this order:
1. logits are divided by `temperature`;
2. `top_k` keeps the k largest (the first of equals);
3. `top_p` keeps the fewest largest whose probability, renormalised after 2, reaches p;
4. what is kept is renormalised, and the token is drawn from it.
The log-prob returned is that of 4: it includes the temperature and the renormalisation, so without top-p and
top-k it equals `log_softmax(logits / temperature)`. With `temperature` 0 the largest logit wins, 2 to 4 do not
apply, and the log-prob is that of `log_softmax(logits)`: the point mass it was drawn from would say 0 always.

Drawing inverts the cumulative distribution at one uniform number per (row, step), so a row's token depends on
its own logits and its own number only, not on the rows beside it. It also spares a noise tensor as large as the
vocabulary, which costs more than a small model's whole step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gradtrace.rollout.settings import SamplingParams

BLOCK = 256
"""Vocabulary entries per block of the two-level search; one level below 4 blocks."""
TOP_P_CANDIDATES = 1024
"""top-p looks at this many most likely tokens first; sorting a whole vocabulary is the exception."""


def draw(
    logits: Tensor, params: SamplingParams, uniforms: Tensor, banned: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Tokens long[B] and their log-probs float32[B], from logits [B, V] and float64 uniforms [B] in [0, 1).

    `banned` long[2, K], rows and tokens: what these rows may not draw; the others share its probability.
    """
    logits = logits.float()
    if banned is not None and banned.numel():
        logits = distribution(logits, params)
        logits[banned[0], banned[1]] = -torch.inf
        return _draw_from(logits, uniforms)
    if params.temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, _at(logits, tokens) - logits.logsumexp(-1)
    if params.temperature != 1:
        logits = logits / params.temperature
    if params.top_k == 0 and params.top_p == 1:
        return _draw_from(logits, uniforms)
    candidates, kept_logits = _truncate(logits, params.top_k, params.top_p)
    choice, log_probs = _draw_from(kept_logits, uniforms)
    return _at(candidates, choice), log_probs


def distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """Log-probs [B, V] of the distribution that `draw` takes its tokens from; -inf where it never does."""
    nowhere = torch.full_like(logits, -torch.inf)
    if params.temperature == 0:
        return nowhere.scatter(1, logits.argmax(-1, keepdim=True), 0.0)
    logits = logits / params.temperature
    if params.top_k == 0 and params.top_p == 1:
        return logits.log_softmax(-1)
    candidates, kept_logits = _truncate(logits, params.top_k, params.top_p)
    return nowhere.scatter(1, candidates, kept_logits.log_softmax(-1))


def _at(values: Tensor, index: Tensor) -> Tensor:
    return values.gather(-1, index[:, None]).squeeze(-1)


def _draw_from(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """One index per row in proportion to exp(logits) [B, C], and its normalised log-prob."""
    probabilities = logits.softmax(-1)
    search = _invert if probabilities.shape[1] < 4 * BLOCK else _invert_by_blocks
    choice = search(probabilities, uniforms)
    return choice, _at(probabilities, choice).log()


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first index whose running sum exceeds `uniform * total`."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    # A double below 1 times the total is below the total, after rounding too: no need to see to it.
    return _first_above(cumulative, uniforms * cumulative[:, -1])


def _invert_by_blocks(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Does what `_invert` does, but finds the block first: a running sum over the whole vocabulary is slow."""
    missing = -weights.shape[1] % BLOCK
    if missing:
        weights = F.pad(weights, (0, missing))
    blocks = weights.view(len(weights), -1, BLOCK)
    cumulative = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    target = uniforms * cumulative[:, -1]
    block = _first_above(cumulative, target)
    before = torch.where(block > 0, _at(cumulative, (block - 1).clamp_(min=0)), 0.0)
    inside = blocks[torch.arange(len(blocks), device=blocks.device), block].cumsum(-1, dtype=torch.float64)
    below_total = torch.nextafter(inside[:, -1], torch.zeros_like(target))
    return block * BLOCK + _first_above(inside, torch.minimum(target - before, below_total))


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Index of the first running sum above the target, which is below the last one: never one of zero weight."""
    index = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(-1)
    return index.clamp_(max=cumulative.shape[1] - 1)  # NaN compares as it likes; the sampler reports it


def _truncate(logits: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Token ids and logits [B, C] of the candidates, most likely first; excluded ones have logit -inf."""
    vocabulary = logits.shape[-1]
    count = min(top_k or TOP_P_CANDIDATES, vocabulary)
    kept, tokens = logits.topk(count)
    if top_p == 1:
        return tokens, kept
    # Without top-k the mass of the rest counts too; with it, the candidates are all there is.
    normaliser = (kept if top_k else logits).logsumexp(-1, keepdim=True)
    cumulative = (kept - normaliser).exp_().cumsum(-1)
    if not top_k and count < vocabulary and bool((cumulative[:, -1] < top_p).any()):
        kept, tokens = logits.sort(descending=True)
        cumulative = (kept - normaliser).exp_().cumsum(-1)
    reached_before = F.pad(cumulative[:, :-1], (1, 0)) >= top_p
    return tokens, kept.masked_fill(reached_before, -torch.inf)
