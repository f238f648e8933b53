"""Exact, fast attribution of gradients to single tokens. Imports torch and nothing else of gradtrace.

`InfluenceTracer` scores response tokens from the factors of a real backward pass, `GhostProduct` scores whole
responses against a given gradient, `directional_derivative` gives forward-mode derivatives of anything.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradtrace.attribution.config import InfluenceConfig
    from gradtrace.attribution.errors import AttributionError
    from gradtrace.attribution.geometry import Factored, Geometry
    from gradtrace.attribution.ghost import GhostProduct
    from gradtrace.attribution.objectives import (
        Passes,
        TrainingPass,
        needs_own_backward,
        objective,
        objective_sign,
        objective_weights,
        plan_passes,
        step_scale,
        target_scale,
    )
    from gradtrace.attribution.parts import TokenParts
    from gradtrace.attribution.result import SIGN, UNIT, InfluenceTrace
    from gradtrace.attribution.tangent import directional_derivative
    from gradtrace.attribution.tracer import InfluenceTracer

__all__ = [
    "SIGN",
    "UNIT",
    "AttributionError",
    "Factored",
    "Geometry",
    "GhostProduct",
    "InfluenceConfig",
    "InfluenceTrace",
    "InfluenceTracer",
    "Passes",
    "TokenParts",
    "TrainingPass",
    "directional_derivative",
    "needs_own_backward",
    "objective",
    "objective_sign",
    "objective_weights",
    "plan_passes",
    "step_scale",
    "target_scale",
]
_MODULE_OF = {
    "Factored": "geometry",
    "Geometry": "geometry",
    "AttributionError": "errors",
    "GhostProduct": "ghost",
    "InfluenceConfig": "config",
    "InfluenceTrace": "result",
    "InfluenceTracer": "tracer",
    "Passes": "objectives",
    "TokenParts": "parts",
    "SIGN": "result",
    "TrainingPass": "objectives",
    "UNIT": "result",
    "directional_derivative": "tangent",
    "needs_own_backward": "objectives",
    "objective": "objectives",
    "objective_sign": "objectives",
    "objective_weights": "objectives",
    "plan_passes": "objectives",
    "step_scale": "objectives",
    "target_scale": "objectives",
}


def __getattr__(name: str) -> Any:
    """Public names are imported on first use, so that reading the configuration does not import torch."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'gradtrace.attribution' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"gradtrace.attribution.{_MODULE_OF[name]}"), name)
