"""Which responses were captured, where, and what that says about the scores."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Set
from typing import Literal

import torch
from torch import Tensor

from gradtrace.attribution.collectives import Ranks
from gradtrace.attribution.config import InfluenceConfig
from gradtrace.attribution.errors import AttributionError
from gradtrace.attribution.factors.labels import Labels
from gradtrace.attribution.factors.layout import Layout
from gradtrace.attribution.factors.modules import Block
from gradtrace.attribution.factors.scopes import Scope, ScopeBatch
from gradtrace.attribution.geometry import Geometry, Source

Role = Literal["both", "step", "target"]
"""What a backward pass is of: the step that tokens contribute, the target it is asked about, or one standing for
both."""

Takes = Literal["all", "scores", "directions"]
"""What a pass is captured for: scores inside of it, the directions of loss terms, or both. Scores of the tail need no
positions of prompts, so they can ride on a pass in which responses share theirs; directions need them."""


class Ledger:
    """Of one batch, from its first capture to `score`."""

    def __init__(self, blocks: list[Block]) -> None:
        self.blocks = blocks
        self.counts: dict[int, int] = {}
        """Tokens of the responses of this rank."""
        self.lengths: dict[int, int] = {}
        """Tokens of all responses; known once `owners` was called."""
        self.steps: set[int] = set()
        self.targets: set[int] = set()
        self.factors: dict[int, float] = {}
        """Target gradient over step gradient, of responses for which one pass was both."""
        self.fired: set[Block] = set()
        self.sources: set[Source] = set()
        """Where the second moments in the backward pass came from."""
        self.tail = all(block.tail for block in blocks if block.scored)
        """Whether the backward pass scores the tail alone."""
        self.captures = 0
        self.capture_seconds = 0.0

    def enter(self, layout: Layout, role: Role, responses: int | None) -> None:
        """A capture begins. `responses`: how many there are, if that is known yet."""
        before = {"both": self.steps | self.targets, "step": self.steps, "target": self.targets}[role]
        again = [response for response in layout.responses if response in before]
        if again:
            raise AttributionError(
                f"response {again[0]} was captured already: every response has one backward pass per score();"
                " call score() or reset() before the next epoch"
            )
        if responses is not None and layout.responses and layout.responses[-1] >= responses:
            raise AttributionError(
                f"response id {layout.responses[-1]} is out of range: accepted has {responses} entries"
            )
        self.captures += 1

    def leave(self, layout: Layout, role: Role, factors: Mapping[int, float]) -> None:
        """Its backward pass is over."""
        self.counts |= layout.token_counts
        if role != "step":
            self.targets |= set(layout.responses)
        if role != "target":
            self.steps |= set(layout.responses)
        if role == "both":
            self.factors |= factors

    def factors_of(self, responses: Tensor) -> Tensor:
        """float64: `factors` of these responses, 0 where there is none."""
        found = [self.factors.get(response, 0.0) for response in responses.flatten().tolist()]
        return torch.tensor(found, dtype=torch.float64).view(responses.shape)

    def owners(self, labels: Labels, ranks: Ranks) -> dict[int, int]:
        """Response → the rank that captured it. Also learns the lengths of the other ranks' responses."""
        last = max(self.counts, default=-1)
        if last >= len(labels):
            raise AttributionError(f"response id {last} was captured, but accepted has only {len(labels)} entries")
        missing = sorted((self.steps | self.targets) - (self.steps & self.targets))
        if missing:
            which, role = missing[0], "target" if missing[0] in self.steps else "step"
            raise AttributionError(
                f"response {which} has no pass with role={role!r}: step and target of a response are captured either in"
                " one pass or in one each"
            )
        same_everywhere = (labels.accepted.tolist(), labels.group.tolist())
        owners: dict[int, int] = {}
        for rank, (counts, theirs) in enumerate(ranks.gather((self.counts, same_everywhere))):
            if theirs != same_everywhere:
                raise AttributionError(f"rank {rank} was given other accepted or group than this one")
            for response in counts:
                if response in owners:
                    raise AttributionError(
                        f"response {response} was captured on ranks {owners[response]} and {rank}: ids are global"
                    )
                owners[response] = rank
            self.lengths.update(counts)
        self.owned = len(owners)
        return owners

    def check(self, scopes: list[Scope], skipped: Mapping[int, str]) -> None:
        """Nothing captured is an error; what is merely odd is a warning that names the likely cause."""
        if not self.owned:
            raise AttributionError(
                "nothing was captured: no backward pass ran inside `with tracer.capture(…)`, or all its rows"
                " had response id −1"
            )
        if self.counts and not self.fired:
            raise AttributionError(
                f"{self.captures} backward pass(es) ran under capture, but no hook of the {len(self.blocks)} traced"
                " layers fired. Likely causes: the forward pass ran under torch.no_grad(), before the tracer was made"
                " or as compiled code (torch.compile), the loss is detached from the model, or autograd.grad was asked"
                " for an input that these layers do not lead to"
            )
        silent = [block.name for block in self.blocks if block not in self.fired]
        if silent and self.counts:
            warnings.warn(
                f"{len(silent)} of {len(self.blocks)} traced layers received no gradient, the first is {silent[0]}:"
                " they have no part in the scores (unused in this pass, or below a detach)",
                stacklevel=3,
            )
        if not scopes:
            warnings.warn(
                f"none of the {len(skipped)} groups holds accepted and rejected responses, so there is no"
                " contrast to score",
                stacklevel=3,
            )

    def drop_non_finite(self, batches: list[ScopeBatch], loss_terms: Mapping[int, Tensor]) -> dict[int, str]:
        """A scope with a bad gradient has no scores; it is skipped with a warning that names the place."""
        skipped: dict[int, str] = {}
        for batch in batches:
            all_finite = batch.all_finite()
            for index, scope in enumerate(batch.scopes):
                found = None if all_finite else batch.non_finite(index)
                bad = [r for r in scope.members if r in loss_terms and not loss_terms[r].isfinite().all()]
                if found is None and not bad:
                    continue
                module, responses = found or ("its own terms", bad)
                skipped |= dict.fromkeys(scope.groups, "non_finite")
                batch.tokens[index] = {}
                warnings.warn(
                    f"group {scope.groups[0]} has no scores: the gradient of response {responses[0]} in {module}"
                    " is not finite",
                    stacklevel=4,
                )
        return skipped

    def meta(self, config: InfluenceConfig, geometry: Geometry, late: Set[Source]) -> dict[str, str]:
        """What the scores are, in the words of the knobs. `late`: where the second moments of loss terms came from."""
        known = config.hessian_mode != "optimizer" or geometry.optimizer is not None
        exact = config.preconditioner_form != "factored" and not any(block.projected for block in self.blocks)
        found = {
            "step": config.output_function,
            "target": config.about,
            "geometry": config.hessian_mode if known else "identity",
            "credit": config.credit,
            "backward_credit": "tail" if config.tail_only else "position",
        }
        if config.hessian_mode == "optimizer":
            found |= {
                "optimizer": geometry.name,
                "preconditioner_form": "exact" if exact else "factored",
                "second_moment_backward": named(self.sources),
                "second_moment_loss_term": named(late if exact else self.sources),
            }
        return found

    def counters(
        self, batches: list[ScopeBatch], labels: Labels, skipped: Mapping[int, str], with_terms: int
    ) -> dict[str, float]:
        """What was scored and what was not, under the names of the logs."""
        mixed, total = len(labels.mixed_groups), len(labels.groups)
        scored = [
            (scope, counts)
            for batch in batches
            for scope, counts in zip(batch.scopes, batch.tokens, strict=True)
            if counts
        ]
        reasons = list(skipped.values())
        metrics: dict[str, float] = {
            "influence_trace/selected_responses": sum(len(counts) for _, counts in scored),
            "influence_trace/selected_prompts": sum(len(scope.groups) for scope, _ in scored),
            "influence_trace/uid_total": total,
            "influence_trace/uid_constant": total - mixed,
            "influence_trace/uid_mixed": mixed,
            "influence_trace/rows_emitted": sum(len(counts) for _, counts in scored),
            "influence_trace/tokens_emitted": sum(sum(counts.values()) for _, counts in scored),
            "influence_trace/loss_term_prompts": with_terms,
            "influence_trace/debug_groups_not_captured": reasons.count("not_captured"),
            "influence_trace/debug_groups_non_finite": reasons.count("non_finite"),
            "influence_trace/debug_captures": self.captures,
            "influence_trace/debug_modules": len(self.blocks),
            "influence_trace/debug_modules_fired": len(self.fired),
            "influence_trace/debug_responses_captured": self.owned,
            "timing_s/influence_capture": self.capture_seconds,
        }
        for batch in batches:
            for name, number in batch.solvers.items():
                key = f"influence_trace/debug_solver_{name}"
                metrics[key] = metrics.get(key, 0) + number
        degrees = [values for batch in batches for values in batch.degrees]
        if degrees:
            metrics["influence_trace/effective_dof"] = float(torch.cat(degrees).mean())
        return {name: float(value) for name, value in metrics.items()}


def named(sources: Iterable[Source]) -> str:
    return ", ".join(sorted(sources)) or "none"
