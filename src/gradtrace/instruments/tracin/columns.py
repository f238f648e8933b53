"""What a step of TracIn selection leaves behind: metrics, and the columns of its trace file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradtrace.batch import RolloutBatch
from gradtrace.instruments.columns import followed_by, response_advantages
from gradtrace.instruments.tracin import TracinConfig, TracinReason
from gradtrace.instruments.tracin.diagnosis import certain_share
from gradtrace.instruments.tracin.rules import Selected
from gradtrace.instruments.tracin.selector import SIGN, UNIT
from gradtrace.metrics import GENERATED

MEASURED = ("train_norm", "direction_norm", "cosine")
"""What a step knows only if it was diagnosed."""


@dataclass(frozen=True, eq=False)
class Measures:
    """What is known of whole gradients, the same on every rank. The defaults stand for a step without scores."""

    val_loss: float = 0.0
    val_loss_min: float = 0.0
    """The smallest part of a single response in `val_loss`; the next is the largest."""
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


@dataclass(eq=False)
class TracinStep:
    """Everything about one training step's selection."""

    validation: RolloutBatch
    validation_step: int
    generated: int
    """Validation responses sampled in this step."""
    overlap: int
    """Validation prompts left out because the training batch has them."""
    scores: Tensor
    """float64[R]."""
    selected: Selected = None  # type: ignore[assignment]  # set once the scores are there
    measures: Measures = field(default_factory=Measures)
    low: Tensor | None = None
    high: Tensor | None = None
    trained: bool = False
    """Whether the validation rollouts are trained on as well."""
    diagnosis: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def meta(self) -> dict[str, Any]:
        was_measured = self.measures.train_norm is not None
        about = {name: v for name, v in asdict(self.measures).items() if was_measured or name not in MEASURED}
        return about | {
            "diagnosis": self.diagnosis,
            "validation_step": self.validation_step,
            "fallback": self.selected.fallback,
            "note": self.selected.note,
        }


def describe(settings: TracinConfig, method: str) -> dict[str, Any]:
    """The meaning of the scores, for the file and the viewer."""
    knobs = ("selection", "val_strategy", "parameters", "preconditioner")
    return {knob: getattr(settings, knob) for knob in knobs} | {"method": method, "sign": SIGN, "unit": UNIT}


def inner_products(result: TracinStep, preconditioner: str) -> dict[str, float]:
    """The extremes, mean and spread of the scores. Until Adam has a state to weigh by, scores have another unit, and
    these have names of their own, so that one chart holds one unit."""
    scores = result.scores[torch.isfinite(result.scores)]
    plain = preconditioner == "adam" and result.measures.weighed is False
    scores = scores if len(scores) else torch.zeros(1)
    values = {
        "min_ip": scores.min(),
        "max_ip": scores.max(),
        "mean_ip": scores.mean(),
        "std_ip": scores.std(correction=0),
    }
    return {f"plain_{name}" if plain else name: float(value) for name, value in values.items()}


def of_validation(result: TracinStep) -> dict[str, float]:
    """Of the validation set's responses: rewards, and the extremes of advantages and of losses −A_r Σ_t ℓ_t."""
    validation, measures = result.validation, result.measures
    if not len(validation):
        return {}
    advantages = response_advantages(validation)
    losses = [len(validation) * part for part in (measures.val_loss_min, measures.val_loss_max)]
    losses += [0.0] if bool((advantages == 0).any()) else []  # those that have no pass
    return {
        "val_reward": float(validation.need("rewards").mean()),
        "val_advantage_min": float(advantages.min()),
        "val_advantage_max": float(advantages.max()),
        "val_loss_min": min(losses),
        "val_loss_max": max(losses),
    }


def tracin_metrics(result: TracinStep, batch: RolloutBatch, preconditioner: str) -> dict[str, float]:
    scores, kept, measures = result.scores, result.selected.kept, result.measures
    finite = scores[torch.isfinite(scores)]
    count = max(1, len(scores))
    signs = {"positive": finite > 0, "negative": finite < 0, "zero": finite == 0}
    values: dict[str, float] = {
        **{f"{sign}_ratio": float(found.sum()) / count for sign, found in signs.items()},
        **{sign: float(found.sum()) for sign, found in signs.items()},
        "non_finite": float(len(scores) - len(finite)),
        **inner_products(result, preconditioner),
        "selected": float(kept.sum()),
        "selected_ratio": float(kept.sum()) / count,
        "fallback": float(result.selected.fallback),
        "no_signal": float(measures.val_norm == 0 or not bool((finite != 0).any())),
        "val_loss": measures.val_loss,
        "val_grad_norm": measures.val_norm,
        "val_prompts": float(len(result.validation.prompts)),
        "val_overlap": float(result.overlap),
        "val_generated": float(result.generated),
    }
    values |= {f"val_grad_norm/{group}": value for group, value in measures.val_norms.items()}
    values |= of_validation(result)
    if measures.train_norm is not None and result.low is not None and result.high is not None:
        values["train_grad_norm"] = measures.train_norm
        values["cosine"] = measures.cosine
        values["certain_share"] = certain_share(scores.numpy(), result.low.numpy(), result.high.numpy())
        values["warnings"] = float(len(result.diagnosis))
    if batch.flipped is not None:
        for label, flipped in (("flipped", batch.flipped), ("unflipped", ~batch.flipped)):
            if bool(flipped.any()):
                values[f"dropped_of_{label}"] = float((~kept & flipped).sum() / flipped.sum())
    metrics = {f"tracin/{name}": value for name, value in values.items()}
    metrics[GENERATED] = float(result.generated)  # the loop adds it to its own
    return metrics | {f"timing_s/{name}": value for name, value in result.seconds.items()}


def joint(batch: RolloutBatch, result: TracinStep) -> RolloutBatch:
    """The training responses, then the validation responses, in groups of their own."""
    parts = (part.only("rewards", "advantages") for part in (batch, result.validation))
    return RolloutBatch.concat([part for part in parts if len(part)])


def tracin_columns(batch: RolloutBatch, result: TracinStep) -> dict[str, Any]:
    """What `Record.write` cannot know of `joint`, and the selection's own."""
    selected, extra = result.selected, len(result.validation)
    columns = {
        "row": followed_by(np.arange(len(batch)), extra, -1),
        "score": followed_by(result.scores, extra, np.nan),
        "kept": followed_by(selected.kept, extra, result.trained),
        "reason": followed_by(selected.reason, extra, TracinReason.VALIDATION),
        "weight": followed_by(selected.weight, extra, result.trained),
    }
    if result.low is not None and result.high is not None:
        columns["score_low"] = followed_by(result.low, extra, np.nan)
        columns["score_high"] = followed_by(result.high, extra, np.nan)
    if batch.flipped is not None:
        columns["flipped"] = followed_by(batch.flipped, extra, False)
    return columns
