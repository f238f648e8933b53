"""What a captured pass is of: the step, the target, or both; and by which factor it becomes the target's."""

from __future__ import annotations

from torch import Tensor

from gradtrace.attribution.config import InfluenceConfig
from gradtrace.attribution.errors import AttributionError
from gradtrace.attribution.factors.captured import Role
from gradtrace.attribution.factors.layout import Layout


def check_target(config: InfluenceConfig, role: Role, target_scale: Tensor | None, sign: Tensor | None) -> None:
    """Raise where a pass does not say what is needed to know the target's gradient, or says it twice."""
    if config.about == "output_function":
        if role != "both" or target_scale is not None:
            raise AttributionError(
                "target='output_function' has one pass and one scale: role and target_scale belong to target='log_prob'"
            )
        return
    if sign is not None:
        raise AttributionError(
            "sign turns the target of target='output_function'; with target='log_prob' give target_scale, which has"
            " the sign in it"
        )
    if role == "both" and target_scale is None and config.output_function != "log_prob":
        raise AttributionError(
            f"target='log_prob' asks about log-probs, and this pass is of {config.output_function!r}: give"
            " target_scale (see objectives.target_scale), or capture a pass of Σ log-probs with role='target' first"
        )


def target_factors(
    config: InfluenceConfig, layout: Layout, scale: float | Tensor, target_scale: Tensor | None
) -> dict[int, float]:
    """Response → what turns its captured gradient (with `scale`) into that of its target, without a sign."""
    factors = {}
    for response in layout.responses:
        own = float(scale[response]) if isinstance(scale, Tensor) else float(scale)
        ratio = 1.0 if target_scale is None else float(target_scale[response]) / own if own else 0.0
        mean = config.response_reduction == "mean"
        factors[response] = ratio / (max(layout.token_counts[response], 1) if mean else 1)
    return factors
