"""What a detector gets (`Moment`) and what it says (`Finding`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradtrace.batch import RolloutBatch
from gradtrace.instruments.blame.reporter import StepBlame
from gradtrace.instruments.findings import FindingsConfig

if TYPE_CHECKING:
    from gradtrace.instruments.findings.reward import Cluster

CULPRITS = 3
"""How many a finding names."""


@dataclass(frozen=True)
class Named:
    """A prompt, a response or a token that a finding names."""

    text: str
    group: int = -1
    row: int = -1
    """Its row in the step's batch."""
    position: int = -1
    share: float | None = None


@dataclass(frozen=True)
class Finding:
    sentence: str
    confidence: float
    """0 to 1: how far beyond its threshold the evidence is; 0.5 is at the threshold."""
    evidence: dict[str, float] = field(default_factory=dict)
    culprits: list[Named] = field(default_factory=list)
    detector: str = ""
    step: int = 0

    @property
    def link(self) -> str:
        """Where the viewer shows it: the group of the first culprit, or the step."""
        group = next((culprit.group for culprit in self.culprits if culprit.group >= 0), None)
        return f"#/step?step={self.step}" if group is None else f"#/group?step={self.step}&group={group}"

    def as_json(self) -> dict[str, Any]:
        evidence = {name: value for name, value in self.evidence.items() if math.isfinite(value)}
        return {**asdict(self), "evidence": evidence, "link": self.link}


@dataclass(frozen=True, eq=False)
class Moment:
    """A training step that has just ended, and the metrics of those before it."""

    step: int
    batch: RolloutBatch
    metrics: Mapping[str, float]
    history: Sequence[Mapping[str, float]]
    """Metrics of earlier steps, oldest first."""
    knobs: FindingsConfig
    blame: StepBlame | None
    decode: Callable[[list[int]], str]
    accepted: Cluster | None = None
    """How the gradients of accepted responses lie; None where blame was not taken."""

    def now(self, *names: str) -> float | None:
        """The first of these metrics that this step has."""
        return next((float(self.metrics[name]) for name in names if name in self.metrics), None)

    def before(self, *names: str) -> np.ndarray:
        """Earlier values of the first of these metrics that this step has; finite ones, of the last `window` steps."""
        name = next((name for name in names if name in self.metrics), "")
        values = [float(row[name]) for row in self.history if isinstance(row.get(name), int | float)]
        return np.array([value for value in values if math.isfinite(value)][-self.knobs.window :])

    def compared(self, *names: str) -> tuple[float, float] | None:
        """This step's value and the median of the steps before; None while there are fewer than `warmup_steps`."""
        value, values = self.now(*names), self.before(*names)
        return None if value is None or len(values) < self.knobs.warmup_steps else (value, float(np.median(values)))

    # ------------------------------------------------------------ who

    def response(self, row: int) -> Named:
        return Named(self.decode(self.batch.response_ids[row]), int(self.batch.group[row]), row)

    def responses_by(self, values: torch.Tensor, descending: bool = True) -> list[Named]:
        """The responses with the largest (or smallest) of these values [R]."""
        return [self.response(row) for row in values.argsort(descending=descending)[:CULPRITS].tolist()]

    def token(self, row: int, position: int, share: float | None = None) -> Named:
        text = self.decode([int(self.batch.responses[row, position])])
        return Named(text, int(self.batch.group[row]), row, position, share)

    def prompt(self, group: int, share: float | None = None) -> Named:
        return Named(self.decode(self.batch.prompts[group]), group, share=share)

    def tokens_by(self, values: torch.Tensor) -> list[Named]:
        """The tokens with the largest of these values [R, T], one of each response."""
        values = torch.where(self.batch.response_mask, values.double(), -torch.inf)
        best, where = values.max(1)
        rows = best.argsort(descending=True)[:CULPRITS].tolist()
        return [self.token(row, int(where[row]), float(best[row])) for row in rows if best[row] > 0]

    def blamed(self) -> list[Named]:
        """Tokens with the largest shares of the step's gradient; where it was not finite, who made it so."""
        if self.blame is None or not len(self.blame.rows):
            return []
        if not self.blame.updates:
            norms = torch.where(self.blame.norm.isfinite(), self.blame.norm, torch.inf).nan_to_num(-1.0, posinf=1e300)
            norms = torch.where(self.blame.optimizer_step >= 0, norms, -1.0)
            return self.responses_by(norms)
        return self.tokens_by(self.blame.of_the_step().share)

    def vocabulary(self, weights: torch.Tensor) -> list[Named]:
        """Vocabulary entries with the largest sums of these weights [R, T]."""
        mask = self.batch.response_mask
        ids, where = self.batch.responses[mask].unique(return_inverse=True)
        sums = torch.zeros(len(ids), dtype=torch.float64).index_add(0, where, weights[mask].double())
        order = sums.argsort(descending=True)[:CULPRITS].tolist()
        return [Named(self.decode([int(ids[i])]), share=float(sums[i])) for i in order if sums[i] > 0]


def named(culprits: Sequence[Named]) -> str:
    """ "token 12 '0' of response 9 to prompt 1, …" for a sentence."""
    words = []
    for culprit in culprits[:CULPRITS]:
        text = culprit.text if len(culprit.text) <= 40 else culprit.text[:39] + "…"
        if culprit.position >= 0:
            words.append(f"token {culprit.position} {text!r} of row {culprit.row} (prompt {culprit.group})")
        elif culprit.row >= 0:
            words.append(f"row {culprit.row} {text!r} (prompt {culprit.group})")
        else:
            words.append(f"prompt {culprit.group} {text!r}" if culprit.group >= 0 else repr(text))
    return ", ".join(words) or "nobody that the traces know"


def sure(value: float, threshold: float) -> float:
    """0.5 at the threshold, towards 1 far beyond it."""
    return 1.0 if not math.isfinite(value) or value <= 0 else min(1.0, max(0.5, 1.0 - 0.5 * threshold / value))
