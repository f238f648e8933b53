"""Exact, fast attribution of gradients to single tokens. Imports torch and nothing else of gradtrace.

`InfluenceTracer(model, optimizer).parts(terms)` scores every token by what the coming optimizer step does to its own
term of the loss (`parts.py`: the step's direction, moved weights, one forward pass). Definitions that need the
gradients of layers, and `GhostProduct`, which scores whole responses against a given gradient, are in `factors/`, which
is imported when one of them is asked for. `directional_derivative` gives forward-mode derivatives of anything.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradtrace.attribution.config import InfluenceConfig
    from gradtrace.attribution.errors import AttributionError
    from gradtrace.attribution.factors.ghost import GhostProduct
    from gradtrace.attribution.factors.objectives import (
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
    from gradtrace.attribution.factors.result import SIGN, UNIT, InfluenceTrace
    from gradtrace.attribution.geometry import Factored, Geometry
    from gradtrace.attribution.parts import TokenParts
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
    "GhostProduct": "factors.ghost",
    "InfluenceConfig": "config",
    "InfluenceTrace": "factors.result",
    "InfluenceTracer": "tracer",
    "Passes": "factors.objectives",
    "TokenParts": "parts",
    "SIGN": "factors.result",
    "TrainingPass": "factors.objectives",
    "UNIT": "factors.result",
    "directional_derivative": "tangent",
    "needs_own_backward": "factors.objectives",
    "objective": "factors.objectives",
    "objective_sign": "factors.objectives",
    "objective_weights": "factors.objectives",
    "plan_passes": "factors.objectives",
    "step_scale": "factors.objectives",
    "target_scale": "factors.objectives",
}


def __getattr__(name: str) -> Any:
    """Public names are imported on first use, so that reading the configuration does not import torch."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'gradtrace.attribution' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"gradtrace.attribution.{_MODULE_OF[name]}"), name)
