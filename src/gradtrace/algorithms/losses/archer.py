"""Archer: reasoning tokens are free to move, knowledge tokens are held; with ASPO's flipped ratio."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gradtrace.algorithms.penalties import kl_estimate
from gradtrace.algorithms.registry import LossInputs, LossOutputs, register_policy_loss, required, straight_through


def high_entropy_tokens(entropies: Tensor, mask: Tensor, quantile: float = 0.8) -> Tensor:
    """bool[R, T]: tokens whose entropy is above the quantile of their own response ("reasoning" tokens).

    Taken per response, so that it depends neither on the rest of the micro-batch nor on how varied the
    difficulty of the prompts is. The quantile interpolates linearly between neighbours.
    """
    real = torch.where(mask, entropies.detach(), torch.nan)
    threshold = torch.nanquantile(real, quantile, dim=-1, keepdim=True)  # [R, 1]; NaN in a row without tokens
    return mask & (real > threshold)


def aspo_weights(ratio: Tensor, advantages: Tensor, clip: Tensor | float, cap: float) -> tuple[Tensor, Tensor, Tensor]:
    """Weight w of −A·∇log π; where it is clipped, which leaves no gradient; where it is capped. All [R, T].

    A ≥ 0: 1/r, so that a good token which became less likely is pushed *more*; clipped beyond r = 1 + clip.
    A < 0: r as usual, clipped below r = 1 − clip. Both at most `cap`, and a capped token keeps its gradient.
    """
    positive = advantages >= 0
    held = torch.where(positive, ratio.clamp(max=1 + clip), ratio.clamp(min=1 - clip))
    weight = torch.where(positive, 1 / held, held)
    return weight.clamp(max=cap), held != ratio, weight > cap


def _by_entropy(high: Tensor, if_high: float, if_low: float, like: Tensor) -> Tensor:
    """[R, T] in the dtype of `like`; torch.where of two Python numbers would round them to float32."""
    return torch.where(high, like.new_tensor(if_high), like.new_tensor(if_low))


def _has_kl(options: dict[str, Any]) -> bool:
    return bool(options["kl_low_entropy"] or options["kl_high_entropy"])


def _needs(options: dict[str, Any]) -> Iterable[str]:
    return ("entropies", "ref_log_probs") if _has_kl(options) else ("entropies",)


@register_policy_loss("archer", needs=_needs, own_kl=_has_kl, plain_at_ratio_one=True)
def archer(
    inputs: LossInputs,
    *,
    entropy_quantile: float = 0.8,
    clip_low_entropy: float = 0.2,
    clip_high_entropy: float = 0.4,
    kl_low_entropy: float = 0.001,
    kl_high_entropy: float = 0.0,
    kl_estimator: str = "k3",
    dual_clip: float = 3.0,
) -> LossOutputs:
    """Loss, to be minimised: −A·w with gradient −A·w·∇log π (none where clipped), plus KL to the reference.

    A token above its response's entropy quantile has the wide clip range and the small KL coefficient, the
    others the narrow range and the larger one. w is ASPO's: see `aspo_weights`. Do not add another KL term.
    """
    entropies = required(inputs.entropies, "entropies", "archer")
    high = high_entropy_tokens(entropies, inputs.mask, entropy_quantile)
    clip = _by_entropy(high, clip_high_entropy, clip_low_entropy, inputs.log_probs)
    ratio = inputs.log_ratio.exp().detach()
    weight, was_clipped, was_capped = aspo_weights(ratio, inputs.advantages, clip, dual_clip)
    moving = straight_through(weight, inputs.log_probs)
    loss = -inputs.advantages * torch.where(was_clipped, weight, moving)
    metrics = {
        **inputs.clip_metrics(was_clipped),
        "actor/pg_clipfrac_lower": was_capped.to(loss.dtype),
        "actor/high_entropy_fraction": high.to(loss.dtype),
    }
    if kl_low_entropy or kl_high_entropy:
        reference = required(inputs.ref_log_probs, "ref_log_probs", "archer with a KL coefficient above 0")
        kl = kl_estimate(inputs.log_probs, reference, inputs.mask, kl_estimator)
        loss = loss + _by_entropy(high, kl_high_entropy, kl_low_entropy, kl) * kl
        metrics["actor/kl_loss"] = kl.detach()
    return LossOutputs(loss, metrics)
