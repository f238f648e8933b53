"""TracIn beside the weights: scores of responses against a validation set, at the weights as they are.

A response's score is ⟨P ∇L_val, ∇L_train(r)⟩, P being the optimizer's preconditioner or the identity. Scores are one
forward-mode pass (or one backward pass without weight gradients) over the responses that have an advantage;
`TracInSelector` chooses which. On several ranks each takes a part of the responses.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradtrace.attribution import AttributionError, Geometry
from gradtrace.attribution.tangent import at_rest
from gradtrace.errors import GradtraceError
from gradtrace.instruments.contract import Backward, Gradient, Host, Observer, Pass, Rows, Table
from gradtrace.instruments.tracin import TracinConfig
from gradtrace.instruments.tracin.columns import Measures
from gradtrace.instruments.tracin.losses import Weighted
from gradtrace.instruments.tracin.selector import TracInSelector
from gradtrace.policy.cpu import accelerated

LAYER = re.compile(r"(?:layers|h|blocks)\.(\d+)\.(\w+)")


@dataclass(frozen=True, eq=False)
class Question:
    """Scores of `train.rows` against each of the `parts` of a validation set."""

    train: Weighted
    parts: list[Weighted]
    measure: bool
    """Measure the gradient of the training batch as well, which costs a pass."""


class TracinObserver(Observer):
    def __init__(self, host: Host, settings: TracinConfig) -> None:
        self.host = host
        self.settings = settings
        method = settings.method if host.is_exact else "ghost"
        self.selector = TracInSelector(host.model, method, settings.parameters)
        self.geometry = adam_geometry(host.optimizer) if settings.preconditioner == "adam" else None

    def answer(self, question: Question | None) -> Table:
        """None asks for the method alone."""
        table = Table(facts={"method": self.selector.method})
        if question is not None:
            rows, scores, measures = self._score(question)
            table.put("scores", dict(zip(rows.tolist(), scores.T, strict=True)))
            table.facts["measures"] = asdict(measures)
        return table

    def _score(self, asked: Question) -> tuple[Tensor, Tensor, Measures]:
        """long[b], the training responses of this rank; float64[K, b], their scores against each of K parts of the
        validation set, which add up; and what was measured."""
        total: dict[str, Tensor] = {}
        found, losses, weighed = [], [], False
        rows = torch.empty(0, dtype=torch.long)
        for part in asked.parts:
            gradient, values = self._gradient(part)
            losses += values
            total |= {name: total[name] + own if name in total else own for name, own in gradient.items()}
            direction = self._preconditioned(gradient)
            # Without moments to weigh by, the gradient came back as it was.
            weighed = any(direction[name] is not gradient[name] for name in direction)
            rows, scores = self._products(asked.train, direction)
            found.append(scores)
        ranks = self.host.ranks
        squares = ranks.products(total, total)
        val_norm = math.sqrt(sum(squares.values()))
        known = Measures(sum(losses), min(losses), max(losses), weighed, val_norm, layer_norms(squares))
        if asked.measure:
            training, _ = self._gradient(asked.train)
            train_norm, direction_norm = (
                math.sqrt(sum(ranks.products(vector, vector).values()))
                for vector in (training, self._preconditioned(total))
            )
            cosine = sum(ranks.products(training, total).values()) / max(train_norm * val_norm, 1e-300)
            known = replace(known, train_norm=train_norm, direction_norm=direction_norm, cosine=cosine)
        return rows, torch.stack(found), known

    def _gradient(self, responses: Weighted) -> tuple[Gradient, list[float]]:
        """The gradient of Σ w_t ℓ_t over the responses of all ranks, where parameters count, and what each response
        adds to that sum, in any order."""
        seen: list[float] = []

        def losses(one: Pass) -> Tensor:
            weighted = weigh(one)
            seen.extend(weighted.detach().sum(1)[(one.rows >= 0).to(weighted.device)].tolist())
            return weighted

        found = self.host.gradient(self._dealt(responses), losses)
        counted = {name: value for name, value in found.items() if name in self.selector.counted}
        self.selector.set_validation_gradient(counted)  # an error if there are none
        return counted, [value for theirs in self.host.ranks.gather(seen) for value in theirs]

    def _products(self, responses: Weighted, direction: Gradient) -> tuple[Tensor, Tensor]:
        """long[b] and float64[b]: rows of this process, and for each the product of the gradient of its own loss and
        `direction`."""
        rows = self._dealt(responses)
        self.selector.set_validation_gradient(direction)
        if self.selector.method == "tangent":
            # A response that holds the padding token must score the same by both methods.
            with self.host.padding_held(), accelerated(self.host.model):
                of_tokens = self.host.derivative(lambda: self.host.values(rows, weigh), self.selector.gradient)
            found = (
                of_tokens.new_zeros(rows.mask.shape).masked_scatter(rows.mask.to(of_tokens.device), of_tokens).sum(1)
            )
        else:

            def around(backward: Backward) -> AbstractContextManager[Any]:
                return self.selector.capture(
                    response=backward.response, tokens=backward.tokens, positions=backward.positions
                )

            self.host.listen(rows, weigh, around)
            found = self.selector.captured(len(responses.rows))[rows.ids]
        return responses.rows[rows.ids], found[: len(rows.ids)].double().cpu()

    def _preconditioned(self, gradient: Gradient) -> Gradient:
        """The gradient divided by Adam's √v̂ + ε before this step; the same one where scores are plain. Parameters that
        the optimizer does not hold are left out, since no update moves them."""
        if self.geometry is None:
            return gradient
        named = dict(self.host.model.named_parameters())
        moved = {name: value for name, value in gradient.items() if self.geometry.holds(named[name])}
        return self.geometry.preconditioned(named, moved)

    def _dealt(self, responses: Weighted) -> Rows:
        """This rank's part; ids are places in `responses.rows`."""
        chosen = responses.batch.select(responses.rows)
        width = chosen.responses.shape[1]
        return self.host.dealt(chosen, weights=responses.weights[responses.rows, :width])


def weigh(one: Pass) -> Tensor:
    """[b, T]: w_t ℓ_t."""
    weights = one.column("weights")
    assert weights is not None
    return one.log_probs * at_rest(weights.to(one.log_probs))


def adam_geometry(optimizer: Any) -> Geometry:
    """The geometry of an optimizer that has Adam's second moments; an error for any other."""
    try:
        geometry = Geometry(optimizer)
        name = "" if geometry.adaptive else geometry.name
    except AttributionError:
        name = type(optimizer).__name__
    if name:
        raise GradtraceError(
            f"preconditioner=adam needs Adam's moments, the optimizer is {name}: use preconditioner=none instead."
        )
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
