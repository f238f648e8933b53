"""`FactorScores`: scores from factors that are captured inside backward passes (`InfluenceTracer.capture`, `score`).

`capture` describes a backward pass. Groups that it holds whole are scored inside of it, by position credit; `score`
scores the others from what was kept, and differentiates tokens' own terms where those are asked for.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradtrace.attribution.collectives import Ranks, gathered
from gradtrace.attribution.config import InfluenceConfig
from gradtrace.attribution.errors import AttributionError
from gradtrace.attribution.factors.capture import Capture, Layout, Role, check_target, target_factors
from gradtrace.attribution.factors.layers import (
    Block,
    FactorHooks,
    Site,
    fused_experts,
    oriented,
    select_blocks,
)
from gradtrace.attribution.factors.loss_terms import HowToScore, LossTerms, Terms
from gradtrace.attribution.factors.one_pass import (
    MemoryEstimate,
    OnePass,
    Store,
    Timing,
    estimate_memory,
    join,
    turned,
)
from gradtrace.attribution.factors.result import InfluenceTrace, assemble, counters
from gradtrace.attribution.factors.scopes import Labels, Scope, ScopeBatch, batches_of, build_scopes
from gradtrace.attribution.geometry import Factored, Geometry, Source, coming_gradients
from gradtrace.attribution.tangent import Method


class FactorScores:
    """The backward pass is unchanged: parameters get the same gradients to the last bit. With a process group, ranks
    hold different responses under global ids and call `score` together."""

    def __init__(
        self, model: nn.Module, optimizer: Any, config: InfluenceConfig, ranks: Ranks, defer_errors: bool = False
    ) -> None:
        """With `defer_errors` a failure inside a backward pass does not interrupt it: `score` raises it instead."""
        self.model = model
        self.config = config
        self.ranks = ranks
        self.defer_errors = defer_errors
        self.geometry = Geometry(optimizer if config.hessian_mode == "optimizer" else None)
        self.blocks = select_blocks(model, config)
        self.hooks = FactorHooks(self.blocks, self._receive)
        self._about_model = fused_experts(model)
        self._open: OnePass | None = None
        self.reset()

    def reset(self) -> None:
        """Forget everything captured since the last `score()`."""
        self.hooks.forget_counts()
        self._labels: Labels | None = None
        self._scopes: list[Scope] = []
        self._skipped: dict[int, str] = {}
        self._batches: list[ScopeBatch] = []
        self._store = Store(self.blocks, self.config)
        self._loss_terms = LossTerms(self.model, self.blocks, self.config, self.geometry, self.ranks)
        self._captured = CapturedResponses()
        self._fired: set[Block] = set()
        self._sources: set[Source] = set()
        self._seconds = 0.0
        self._begun = False
        for block in self.blocks:
            block.scaling = block.preconditioner = None
        self._timing = Timing(self.config.profile_timing)
        self._failure: Exception | None = None

    def memory_estimate(self, responses: int, tokens: int, whole_groups: bool = False) -> MemoryEstimate:
        """Bytes that a batch of this size will need, before anything is allocated."""
        return estimate_memory(self.blocks, self.config, responses, tokens, whole_groups)

    def begin(self) -> None:
        """Read the optimizer's state, which must not change until `score`. The first `capture` does it otherwise;
        where weights are sharded it is collective, and every rank calls it."""
        self._begun = True
        for block in self.blocks if self.geometry.adaptive else ():
            parameter = self._loss_terms.parameters[block.parameter_name]
            self._sources.add(self.geometry.source(parameter))
            denominator = self.geometry.denominator(parameter)
            if denominator is None:
                continue
            if self._loss_terms.applies_late(block):
                block.preconditioner = oriented(block, gathered(denominator)).reciprocal()
            else:
                block.scaling = Factored.of(oriented(block, denominator))

    # ---------------------------------------------------------------- capture

    @contextmanager
    def capture(
        self,
        *,
        response: Tensor,
        tokens: Tensor,
        scale: float | Tensor = 1.0,
        target_scale: Tensor | None = None,
        role: Role = "both",
        positions: Mapping[str, Tensor] | None = None,
        **labels: Tensor | None,
    ) -> Iterator[None]:
        """The backward pass inside belongs to these rows.

        `response`: long[B], the response id of each batch row, −1 = ignore; long[B, S] for packed rows (then the
        prompt's positions carry the id too). `tokens`: bool[B, S], True where input_ids holds a response token.
        `positions` says, for a module that sees only some positions, which (flat indices into B·S).
        `scale` makes the gradient of this pass the one that a step follows uphill, without normalisers: for a loss it
        is negative. float[R] gives each response its own. `target_scale`, float[R], makes it that of the responses'
        log-probs, Σ_t ∇ℓ_t; needed for target='log_prob' where the pass is of another objective. Where no factor can
        do that, the target has a pass of its own first, with role="target" (objective Σ_t ℓ_t), and then role="step".
        `labels` of *all* responses: `accepted`, bool[R], and `group`, long[R]; then groups that this micro-batch holds
        whole are scored right here. `advantages`, float[R], for contrastive_agg='advantage'. `sign`, with
        target='output_function' only: float[R] of ±1 for an objective that already counts responses with a sign, as a
        policy-gradient loss does, so that the contrast does not count it a second time.
        """
        if self._open is not None:
            raise AttributionError("capture() is open already; one backward pass belongs to one capture")
        check_target(self.config, role, target_scale, labels.get("sign"))
        if not self._begun:
            self.begin()
        layout = Layout.without_ignored_rows(response, tokens, scale)
        self._set_labels(labels)
        self._captured.enter(layout, role, None if self._labels is None else len(self._labels))
        capture = Capture(layout, dict(positions or {}), role, target_factors(self.config, layout, scale, target_scale))
        self._open = OnePass(
            capture, self.config, self._store, self._timing, self._labels, self._scopes, self._captured.targets
        )
        try:
            yield
            if self._failure is None:
                self._attempt(self._open.finish)
            self._captured.leave(capture)
            self._batches += self._open.whole
        finally:
            self._open = None
            self.hooks.forget_calls()

    def _set_labels(self, columns: Mapping[str, Tensor | None]) -> None:
        unknown = sorted(set(columns) - {"accepted", "group", "advantages", "sign"})
        if unknown:
            raise TypeError(
                f"{unknown[0]!r} is no argument; of all responses there are accepted, group, advantages, sign"
            )
        accepted, group = columns.get("accepted"), columns.get("group")
        if accepted is None or group is None:
            return
        labels = Labels.of(accepted, group, columns.get("advantages"), columns.get("sign"))
        if self._labels is None:
            self._labels = labels
            self._scopes, self._skipped = build_scopes(labels, self.config)
        elif not self._labels.same_as(labels):
            raise AttributionError(
                "accepted, group or advantages differ from those given before; call score() or reset() between batches"
            )

    def _receive(self, block: Block, site: Site, gradient: Tensor, x: Tensor) -> None:
        """Called inside the backward pass for every call of a traced module."""
        if self._open is None or self._failure is not None or not self._open.capture.layout.responses:
            return
        started = time.perf_counter()
        self._fired.add(block)
        self._attempt(self._open.receive, block, site, gradient, x, self.hooks.calls[block] == 1)
        self._seconds += time.perf_counter() - started

    def _attempt(self, work: Callable[..., None], *arguments: object) -> None:
        """A failure in here reaches the backward pass only if nobody wants to hear of it later."""
        try:
            work(*arguments)
        except Exception as error:
            if not self.defer_errors:
                raise
            self._failure = self._failure or error

    # ---------------------------------------------------------------- score

    def score(
        self,
        *,
        terms: Terms | None = None,
        method: Method | None = None,
        coming: Mapping[str, Tensor] | Literal[True] | None = None,
        **labels: Tensor | None,
    ) -> InfluenceTrace:
        """Scores of everything captured since the last call, which is forgotten then.

        `labels` of all R responses as in `capture`, which may have had them already.

        `terms` is needed for loss-term credit: it runs the model on the given responses and returns every token's own
        term of the step, one after the other, with the sign and scale of what was captured as the step. Where weights
        are sharded it is called with one response at a time, and with none on idle ranks, which only join collectives;
        or, as `SharedTerms`, with all responses of a group on every rank.

        `method` is how own terms are differentiated, by default the faster one for this model (see `tangent`).
        `coming`: the gradient that the optimizer will be given next, by parameter name; True reads `parameter.grad`.
        The second moment for loss terms is then the one that this step will see.
        """
        started = time.perf_counter()
        self._set_labels(labels)
        if self._labels is None:
            raise AttributionError("score() needs accepted and group: they were given neither here nor to capture()")
        if self.config.wants_loss_term and terms is None:
            raise AttributionError(f"credit={self.config.credit!r} needs `terms`, see the help of score()")
        try:
            failures = [s for s in self.ranks.gather(self._failure and str(self._failure)) if s is not None]
            if failures:  # of any rank: the others cannot score without it
                raise AttributionError(f"capture failed: {failures[0]}") from self._failure
            owners = self._captured.owners(self._labels, self.ranks)
            self._check(owners)
            with torch.no_grad():
                self._score_stored(owners, self._labels)
                solved = time.perf_counter()
                found: dict[int, Tensor] = {}
                if terms is not None and self.config.wants_loss_term:
                    how = HowToScore(terms, coming_gradients(self._loss_terms.parameters, coming), method)
                    with self.hooks.paused():
                        found = self._loss_terms.score(self._scopes, self._batches, owners, self._captured.counts, how)
            trace = self._assembled(self._labels, found)
            trace.metrics |= {
                "influence_trace/debug_responses_captured": float(len(owners)),
                "timing_s/influence_score": solved - started,
                "timing_s/influence_loss_term": time.perf_counter() - solved,
            }
            return trace
        finally:
            self.reset()

    def _score_stored(self, owners: dict[int, int], labels: Labels) -> None:
        """Scopes that no single micro-batch held whole."""
        done = {id(scope) for batch in self._batches for scope in batch.scopes}
        mine, split = [], []
        for scope in self._scopes:
            ranks = {owners.get(response) for response in scope.members}
            if None in ranks:
                self._skipped |= dict.fromkeys(scope.groups, "not_captured")
            elif len(ranks) > 1:
                split.append(scope)
            elif self.ranks.place in ranks and id(scope) not in done:
                mine.append(scope)
        captured = {r: self.config.captured(count) for r, count in self._captured.counts.items()}
        whole = batches_of(mine, self._captured.lengths, captured, self.config)
        divided = batches_of(split, self._captured.lengths, captured, self.config)
        for block in self.blocks:
            for batch in whole + divided:
                alone = batch in whole
                if alone and block not in self._fired:
                    continue
                gradients = self._store.gradients(block, batch.members)
                if not alone:  # only these travel: the response gradients of scopes that are split over ranks
                    self.ranks.sum(gradients)
                tokens = self._store.tokens[block]
                factors = [[(tokens.get(r), n) for r, n in counts.items()] for counts in batch.tokens]
                with self._timing("solve", gradients):
                    rows = join(factors, batch.width, like=gradients)
                    signed = turned(gradients, batch.members, labels)
                    signed = signed.unflatten(0, (1, len(batch.scopes), -1))
                    batch.add([block], signed, rows, Ranks() if alone else self.ranks)
            self._store.tokens[block].clear()
        self._batches += whole + divided

    # ---------------------------------------------------------------- warnings and metrics

    def _check(self, owners: Mapping[int, int]) -> None:
        """Nothing captured is an error; what is merely odd is a warning that names the likely cause."""
        if not owners:
            raise AttributionError(
                "nothing was captured: no backward pass ran inside `with tracer.capture(…)`, or all its rows"
                " had response id −1"
            )
        if self._captured.counts and not self._fired:
            raise AttributionError(
                f"{self._captured.passes} backward pass(es) ran under capture, but no hook of the {len(self.blocks)}"
                " traced layers fired. Likely causes: the forward pass ran under torch.no_grad(), before the tracer was"
                " made or as compiled code (torch.compile), the loss is detached from the model, or autograd.grad was"
                " asked for an input that these layers do not lead to"
            )
        silent = [block.name for block in self.blocks if block not in self._fired]
        if silent and self._captured.counts:
            warnings.warn(
                f"{len(silent)} of {len(self.blocks)} traced layers received no gradient, the first is {silent[0]}:"
                " they have no part in the scores (unused in this pass, or below a detach)",
                stacklevel=3,
            )
        if not self._scopes:
            warnings.warn(
                f"none of the {len(self._skipped)} groups holds accepted and rejected responses, so there is no"
                " contrast to score",
                stacklevel=3,
            )

    def _assembled(self, labels: Labels, loss_terms: dict[int, Tensor]) -> InfluenceTrace:
        """Return the trace with its warnings, meta and metrics."""
        self._drop_non_finite(loss_terms)
        trace = assemble(self._batches, self._captured.counts, self._captured.factors, labels, loss_terms, self.config)
        here = {group for batch in self._batches for scope in batch.scopes for group in scope.groups}
        elsewhere = {group for scope in self._scopes for group in scope.groups if group not in here}
        trace.skipped = dict.fromkeys(sorted(elsewhere), "other_rank") | self._skipped
        trace.warnings += [said for said in (self._torn_groups(), self._about_model) if said]
        trace.meta = self._meta() | {"captures": self.hooks.captures()}
        trace.metrics |= counters(self._batches, labels, self._skipped)
        trace.metrics |= self._timing.seconds | {
            "timing_s/influence_capture": self._seconds,
            "influence_trace/debug_captures": float(self._captured.passes),
            "influence_trace/debug_modules": float(len(self.blocks)),
            "influence_trace/debug_modules_fired": float(len(self._fired)),
            "influence_trace/debug_bytes_moved": float(self.ranks.bytes_moved),
            "influence_trace/debug_forward_captures": float(self.hooks.forward_captures.total()),
            "influence_trace/debug_backward_captures": float(self.hooks.backward_captures.total()),
        }
        return trace

    def _drop_non_finite(self, loss_terms: Mapping[int, Tensor]) -> None:
        """A scope with a bad gradient has no scores; it is skipped with a warning that names the place."""
        for batch in self._batches:
            all_finite = batch.all_finite()
            for index, scope in enumerate(batch.scopes):
                found = None if all_finite else batch.non_finite(index)
                bad = [r for r in scope.members if r in loss_terms and not loss_terms[r].isfinite().all()]
                if found is None and not bad:
                    continue
                module, responses = found or ("its own terms", bad)
                self._skipped |= dict.fromkeys(scope.groups, "non_finite")
                batch.tokens[index] = {}
                warnings.warn(
                    f"group {scope.groups[0]} has no scores: the gradient of response {responses[0]} in {module}"
                    " is not finite",
                    stacklevel=5,
                )

    def _torn_groups(self) -> str:
        """Groups of which this rank saw a part, where nobody said that there are other ranks."""
        if self.ranks.size > 1 or not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return ""
        here = set(self._captured.counts)
        torn = [scope for scope in self._scopes if 0 < len(here.intersection(scope.members)) < len(scope.members)]
        if not torn:
            return ""
        said = (
            f"{len(torn)} groups have no scores: this rank captured a part of their responses, and it is one of "
            f"{dist.get_world_size()}. Pass process_group=torch.distributed.group.WORLD to InfluenceTracer, with "
            "response ids that are global, or keep groups whole on a rank"
        )
        warnings.warn(said, stacklevel=5)
        return said

    def _meta(self) -> dict[str, Any]:
        """What the scores are, in the words of the knobs."""
        config, geometry = self.config, self.geometry
        known = config.hessian_mode != "optimizer" or geometry.optimizer is not None
        found = {
            "step": config.output_function,
            "target": config.about,
            "geometry": config.hessian_mode if known else "identity",
            "credit": config.credit,
        }
        if config.hessian_mode == "optimizer":
            exact = config.preconditioner_form != "factored" and not any(block.projected for block in self.blocks)
            late = self._loss_terms.sources if exact else self._sources
            found |= {
                "optimizer": geometry.name,
                "preconditioner_form": "exact" if exact else "factored",
                "second_moment_backward": ", ".join(sorted(self._sources)) or "none",
                "second_moment_loss_term": ", ".join(sorted(late)) or "none",
            }
        return found


class CapturedResponses:
    """Which responses of one batch were captured, and as what; from the first capture to `score`."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        """Tokens of the responses of this rank."""
        self.lengths: dict[int, int] = {}
        """Tokens of all responses; known once `owners` was called."""
        self.steps: set[int] = set()
        self.targets: set[int] = set()
        self.factors: dict[int, float] = {}
        """Target gradient over step gradient, of responses for which one pass was both."""
        self.passes = 0

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
        self.passes += 1

    def leave(self, capture: Capture) -> None:
        """Its backward pass is over."""
        responses = set(capture.layout.responses)
        self.counts |= capture.layout.token_counts
        if capture.role != "step":
            self.targets |= responses
        if capture.role != "target":
            self.steps |= responses
        if capture.role == "both":
            self.factors |= capture.factors

    def owners(self, labels: Labels, ranks: Ranks) -> dict[int, int]:
        """Response → the rank that captured it. Also learns the lengths of the other ranks' responses."""
        last = max(self.counts, default=-1)
        if last >= len(labels):
            raise AttributionError(f"response id {last} was captured, but accepted has only {len(labels)} entries")
        missing = sorted(self.steps ^ self.targets)
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
        return owners
