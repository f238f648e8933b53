"""Exact, fast attribution of gradients to single tokens. Imports torch and nothing else of gradtrace.

`InfluenceTracer(model, optimizer).parts(terms)` scores every token by what the coming optimizer step does to its own
term of the loss (`parts.py`: the step's direction, moved weights, one forward pass). Definitions that need the
gradients of layers, and `GhostProduct`, which scores whole responses against a given gradient, are in `factors/`, which
is imported on first use. `directional_derivative` gives forward-mode derivatives of anything.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradtrace.attribution.config import InfluenceConfig as InfluenceConfig
    from gradtrace.attribution.errors import AttributionError as AttributionError
    from gradtrace.attribution.factors.ghost import GhostProduct as GhostProduct
    from gradtrace.attribution.factors.objectives import Passes as Passes
    from gradtrace.attribution.factors.objectives import TrainingPass as TrainingPass
    from gradtrace.attribution.factors.objectives import needs_own_backward as needs_own_backward
    from gradtrace.attribution.factors.objectives import objective as objective
    from gradtrace.attribution.factors.objectives import objective_sign as objective_sign
    from gradtrace.attribution.factors.objectives import objective_weights as objective_weights
    from gradtrace.attribution.factors.objectives import plan_passes as plan_passes
    from gradtrace.attribution.factors.objectives import step_scale as step_scale
    from gradtrace.attribution.factors.objectives import target_scale as target_scale
    from gradtrace.attribution.factors.result import SIGN as SIGN
    from gradtrace.attribution.factors.result import UNIT as UNIT
    from gradtrace.attribution.factors.result import InfluenceTrace as InfluenceTrace
    from gradtrace.attribution.geometry import Factored as Factored
    from gradtrace.attribution.geometry import Geometry as Geometry
    from gradtrace.attribution.parts import TokenParts as TokenParts
    from gradtrace.attribution.tangent import directional_derivative as directional_derivative
    from gradtrace.attribution.tracer import InfluenceTracer as InfluenceTracer

_NAMES = {
    "config": ("InfluenceConfig",),
    "errors": ("AttributionError",),
    "factors.ghost": ("GhostProduct",),
    "factors.objectives": (
        *("Passes", "TrainingPass", "needs_own_backward", "objective", "objective_sign", "objective_weights"),
        *("plan_passes", "step_scale", "target_scale"),
    ),
    "factors.result": ("SIGN", "UNIT", "InfluenceTrace"),
    "geometry": ("Factored", "Geometry"),
    "parts": ("TokenParts",),
    "tangent": ("directional_derivative",),
    "tracer": ("InfluenceTracer",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Public names are imported on first use, so that reading the configuration does not import torch."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'gradtrace.attribution' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"gradtrace.attribution.{_MODULE_OF[name]}"), name)
