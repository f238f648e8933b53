"""How verl's `actor.loss_agg_mode` weighs tokens, as its `core_algos.agg_loss` does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradtrace.errors import GradtraceError


def batch_weights(mask: Tensor, actor: Any) -> Tensor:
    """float[R, T]: the weight of every token in the loss of a whole batch with this mask."""
    lengths = mask.sum(1)
    tokens, sequences, longest = int(lengths.sum()), int((lengths > 0).sum()), int(lengths.max())
    return mask * _response_weights(actor, lengths, tokens, sequences, longest).float()[:, None]


def micro_batch_weights(micro_batch: Any, actor: Any) -> Tensor:
    """float[b]: what verl multiplies the token losses of each response of a micro-batch by."""
    mask = micro_batch["response_mask"]
    lengths = torch.stack([part.sum() for part in mask.unbind()]).cpu()
    tokens, sequences, ranks = (
        float(micro_batch[name]) for name in ("batch_num_tokens", "global_batch_size", "dp_size")
    )
    longest = int(mask.offsets().diff().max())
    return (ranks * _response_weights(actor, lengths, tokens, sequences, longest)).float()


def _response_weights(actor: Any, lengths: Tensor, tokens: float, sequences: float, longest: int) -> Tensor:
    """float64[b], from the lengths of responses and from what their whole mini-batch holds."""
    one, tokens, sequences = torch.ones_like(lengths, dtype=torch.float64), max(tokens, 1), max(sequences, 1)
    weights = {
        "token-mean": one / tokens,
        "token-sum": one,
        "seq-mean-token-mean": one / sequences / (lengths + 1e-8),
        "seq-mean-token-sum": one / sequences,
        "seq-mean-token-sum-norm": one / sequences / (actor.loss_scale_factor or longest),
    }
    mode = actor.loss_agg_mode
    if mode not in weights:
        raise GradtraceError(
            f"actor.loss_agg_mode={mode}: how it weighs tokens is not known to gradtrace. Valid: {', '.join(weights)}."
        )
    return weights[mode]
