"""The mathematics of TracIn scores, the same for every host.

A response's score is ⟨P ∇L_val, ∇L_train(r)⟩, P being the optimizer's preconditioner or the identity. Of a validation
set in parts every part gives scores of its own, which add up: from their spread comes an interval.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradtrace.attribution import AttributionError, Geometry
from gradtrace.errors import GradtraceError
from gradtrace.instruments.host import Gradient, Rows, TracinHost

LAYER = re.compile(r"(?:layers|h|blocks)\.(\d+)\.(\w+)")


@dataclass(frozen=True, eq=False)
class Measures:
    """What is known of whole gradients, the same on every rank. The defaults stand for a step without scores."""

    val_loss: float = 0.0
    val_loss_min: float = 0.0
    """The smallest part of a single response in `val_loss`."""
    val_loss_max: float = 0.0
    weighed: bool | None = None
    """Whether Adam's moments weighed the validation gradient: before its first step it has none, and scores have
    another unit. None: there are no scores."""
    val_norm: float = 0.0
    """Norm of the validation gradient, before a preconditioner changes it."""
    val_norms: dict[str, float] = field(default_factory=dict)
    """Norm of the validation gradient by layer group."""
    train_norm: float | None = None
    """Norm of the whole batch's gradient; None where it was not measured, and neither were the next two."""
    direction_norm: float = 0.0
    """Norm of the preconditioned validation gradient."""
    cosine: float = 0.0
    """Between the whole batch's gradient and the validation gradient."""


def score_parts(host: TracinHost[Rows], train: Rows, parts: Sequence[Rows], measure: bool) -> tuple[Tensor, Measures]:
    """float64[K, b]: the training responses against each of K parts of the validation set; and what was measured.

    `measure` asks for the training gradient as well, which costs a pass of its own.
    """
    total: Gradient = {}
    scores, losses, weighed = [], [], False
    for part in parts:
        gradient, values = host.gradient(part)
        losses += values
        total |= {name: total[name] + own if name in total else own for name, own in gradient.items()}
        direction = host.preconditioned(gradient)
        # Without moments to weigh by, the gradient came back as it was.
        weighed = any(direction[name] is not gradient[name] for name in direction)
        scores.append(host.scores(train, direction))
    squares = host.ranks.products(total, total)
    val_norm = math.sqrt(sum(squares.values()))
    known = sum(losses), min(losses), max(losses), weighed, val_norm, layer_norms(squares)
    if not measure:
        return torch.stack(scores), Measures(*known)
    training, _ = host.gradient(train)
    direction = host.preconditioned(total)
    train_norm, direction_norm = (
        math.sqrt(sum(host.ranks.products(vector, vector).values())) for vector in (training, direction)
    )
    cosine = sum(host.ranks.products(training, total).values()) / max(train_norm * val_norm, 1e-300)
    return torch.stack(scores), Measures(*known, train_norm, direction_norm, cosine)


def by_adam(optimizer: Any, parameters: Mapping[str, nn.Parameter], gradient: Gradient, key: str) -> Gradient:
    """`gradient` divided by Adam's √v̂ + ε, from the optimizer's state before this step.

    Parameters that the optimizer does not hold are left out, since no update moves them. `key` names the setting in the
    error that an optimizer without second moments is.
    """
    geometry = adam_geometry(optimizer, key)
    moved = {name: value for name, value in gradient.items() if geometry.holds(parameters[name])}
    return geometry.preconditioned(parameters, moved)


def adam_geometry(optimizer: Any, key: str) -> Geometry:
    """The geometry of an optimizer that has Adam's second moments; an error for any other."""
    try:
        geometry = Geometry(optimizer)
        name = "" if geometry.adaptive else geometry.name
    except AttributionError:
        name = type(optimizer).__name__
    if name:
        raise GradtraceError(f"{key}=adam needs Adam's moments, the optimizer is {name}: use {key}=none instead.")
    return geometry


def layer_norms(squares: Mapping[str, float]) -> dict[str, float]:
    """Norms by layer group (embedding, layer_0_attention, layer_0_mlp …, head, other), from squared norms by name."""
    groups: dict[str, float] = defaultdict(float)
    for name, square in squares.items():
        groups[layer_group(name)] += square
    return {group: math.sqrt(value) for group, value in groups.items()}


def layer_group(name: str) -> str:
    """The group that a parameter belongs to, by its name."""
    found = LAYER.search(name)
    if found:
        kinds = {"attn": "attention", "attention": "attention", "mlp": "mlp"}
        kind = next((kind for part, kind in kinds.items() if part in found[2]), "norm")
        return f"layer_{found[1]}_{kind}"
    if "embed" in name or "wte" in name or "wpe" in name:
        return "embedding"
    return "head" if "lm_head" in name else "other"
