"""`InfluenceTracer`: what training on each token does.

`parts` says it of the coming step, in nats of the loss as it is trained, from one forward pass (parts.py).

The rest of this file is about the contrast of right and wrong answers, for which gradients of layers are captured.
Those scores come in two tiers. Inside the backward pass tokens of every mixed group are scored from factors of the
layers (`tail`, where that equals the token's own term, or `position`). For some groups the pass also adds up
the direction that their scores are about, and one forward-mode pass along it gives every token's own term
(`loss_term`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradtrace.attribution.collectives import Ranks, gathered
from gradtrace.attribution.config import InfluenceConfig
from gradtrace.attribution.errors import AttributionError
from gradtrace.attribution.factors.capture import Capture
from gradtrace.attribution.factors.captured import Ledger, Role, Takes
from gradtrace.attribution.factors.ghost import oriented
from gradtrace.attribution.factors.hooks import FactorHooks
from gradtrace.attribution.factors.labels import Labels
from gradtrace.attribution.factors.layout import Layout
from gradtrace.attribution.factors.loss_terms import LossTerms, Terms
from gradtrace.attribution.factors.memory import MemoryEstimate, estimate_memory
from gradtrace.attribution.factors.modules import Block, Site, select_blocks
from gradtrace.attribution.factors.one_pass import OnePass, Receivers, turned
from gradtrace.attribution.factors.passes import check_target, target_factors
from gradtrace.attribution.factors.result import InfluenceTrace, assemble
from gradtrace.attribution.factors.scopes import Scope, ScopeBatch, batches_of, build_scopes
from gradtrace.attribution.factors.store import Store, join
from gradtrace.attribution.factors.timing import Timing
from gradtrace.attribution.factors.warnings import coarse_projection, fused_experts, remarks
from gradtrace.attribution.geometry import Factored, Geometry, coming_gradients
from gradtrace.attribution.parts import OwnTerms, TokenParts, groups_in_turn, token_parts
from gradtrace.attribution.tangent import Method, faster_method


class InfluenceTracer:
    """Scores response tokens by what training does.

    ```python
    tracer = InfluenceTracer(model, optimizer)
    loss.backward()                                     # and clip, as ever
    parts = tracer.parts(terms)                         # before optimizer.step()
    ```

    With an `InfluenceConfig` it captures gradient factors of the model's layers during backward passes, for the
    definitions that the config names:

    ```python
    tracer = InfluenceTracer(model, optimizer, InfluenceConfig(projection_dim_factor=0))
    with tracer.capture(response=rows, tokens=mask, accepted=accepted, group=group, scale=…, target_scale=…):
        loss.backward()                                 # as often as there are micro-batches
    trace = tracer.score(terms=own_terms, coming=True)  # before optimizer.step()
    ```

    The backward pass is unchanged: parameters get the same gradients to the last bit. With a
    `process_group`, ranks hold different responses under global ids and call `score` together.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        config: InfluenceConfig | None = None,
        process_group: dist.ProcessGroup | None = None,
        defer_errors: bool = False,
    ) -> None:
        """`optimizer`: the one that takes the steps. Without a `config` hooks are on the model inside `capture` only.
        With `defer_errors` a failure inside a backward pass does not interrupt it: `score` raises it instead."""
        self.model = model
        self.optimizer = optimizer
        self.defer_errors = defer_errors
        self.config = config or InfluenceConfig()
        self.geometry = Geometry(optimizer if self.config.hessian_mode == "optimizer" else None)
        self.blocks = select_blocks(model, self.config)
        self._about_model = (fused_experts(model), coarse_projection(self.blocks))
        self.ranks, self._hooks = Ranks(process_group), FactorHooks(self.blocks, self._receive)
        self._open: OnePass | None = None
        self._turn = 0
        self._attaches_late = config is None
        if self._attaches_late:
            self._hooks.close()
        self.reset()

    def reset(self) -> None:
        """Forget everything captured since the last `score()`."""
        self._hooks.forget_counts()
        self._labels: Labels | None = None
        self._scopes: list[Scope] = []
        self._skipped: dict[int, str] = {}
        self._loss_term_groups: Collection[int] | None = None
        self._batches: list[ScopeBatch] = []
        self._store = Store(self.blocks, self.config)
        self._loss_terms = LossTerms(self.model, self.config, self.geometry, self.ranks)
        self._ledger = Ledger(self.blocks)
        self._begun = False
        for block in self.blocks:
            block.scaling = block.preconditioner = None
        self._timing = Timing(self.config.profile_timing)
        self._failure: Exception | None = None

    def close(self) -> None:
        """Remove the hooks from the model; `attach` puts them back."""
        self._hooks.close()

    def attach(self) -> None:
        """Needed only after `close`: a tracer has its hooks on the model from the start."""
        self._hooks.attach()

    def __enter__(self) -> InfluenceTracer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def parts(
        self,
        terms: OwnTerms,
        clip_factor: float | None = None,
        group: Tensor | None = None,
        measure: int = 0,
    ) -> TokenParts:
        """What the coming step does to every token's own term of the loss; after `loss.backward()` and clipping, before
        `optimizer.step()`. See `TokenParts`.

        `terms()` runs the model and returns each response's own terms of that loss, one tensor per response; together
        they sum to the loss. `clip_factor`: what clipping has multiplied the gradient by.

        With `group`, long[R], the parts of `measure` groups in the objective of their own prompt are taken as well; the
        groups take turns from call to call. Each costs two more forward passes and a backward pass, and holds the
        graph of all of `terms()`.
        """
        if self.optimizer is None:
            raise AttributionError(
                "parts are of an optimizer's step: make the tracer as InfluenceTracer(model, optimizer)"
            )
        if measure and group is None:
            raise AttributionError(f"measure={measure} asks about groups: give group, long[R], as well")
        chosen = None if group is None else groups_in_turn(group, measure, self._turn, self.ranks)
        self._turn += 1
        return token_parts(
            self.model, self.optimizer, terms, clip_factor=clip_factor, measured=chosen, ranks=self.ranks
        )

    def memory_estimate(self, responses: int, tokens: int, whole_groups: bool = False) -> MemoryEstimate:
        """Bytes that a batch of this size will need, before anything is allocated."""
        return estimate_memory(self.blocks, self.config, responses, tokens, whole_groups)

    def begin(self, loss_term_groups: Collection[int] | None = None) -> None:
        """Read the optimizer's state, which must not change until `score`. The first `capture` does it otherwise;
        where weights are sharded it is collective, and every rank calls it.

        `loss_term_groups`: the groups that get loss terms, instead of the first `loss_term_prompts` mixed ones.
        """
        self._begun = True
        self._loss_term_groups = loss_term_groups
        for block in self.blocks:
            late = self._loss_terms.applies_late(block)
            if not self.geometry.adaptive or (late and not block.scored):
                continue
            parameter = self._loss_terms.parameters[block.parameter_name]
            self._ledger.sources.add(self.geometry.source(parameter))
            denominator = self.geometry.denominator(parameter)
            if denominator is None:
                continue
            if late:
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
        accepted: Tensor | None = None,
        group: Tensor | None = None,
        advantages: Tensor | None = None,
        sign: Tensor | None = None,
        scale: float | Tensor = 1.0,
        target_scale: Tensor | None = None,
        role: Role = "both",
        positions: Mapping[str, Tensor] | None = None,
        predicted_at: Tensor | None = None,
        takes: Takes = "all",
    ) -> Iterator[None]:
        """The backward pass inside belongs to these rows.

        `response`: long[B], the response id of each batch row, −1 = ignore; long[B, S] for packed rows (then the
        prompt's positions carry the id too). `tokens`: bool[B, S], True where input_ids holds a response token.
        `accepted`: bool[R], `group`: long[R], and `advantages`: float[R] for contrastive_agg='advantage'.
        `positions` says, for a module that sees only some positions, which (flat indices into B·S).
        `scale` makes the gradient of this pass the one that a step follows uphill, without normalisers: for a loss it
        is negative. float[R] gives each response its own. `target_scale`, float[R], makes it that of the responses'
        log-probs, Σ_t ∇ℓ_t; needed for target='log_prob' where the pass is of another objective. Where no factor can
        do that, the target has a pass of its own first, with role="target" (objective Σ_t ℓ_t), and then role="step".
        `sign`, with target='output_function' only: float[R] of ±1 for an objective that already counts responses with
        a sign, as a policy-gradient loss does, so that the contrast does not count it a second time.
        `predicted_at` and `takes` are for responses that share the positions of their prompt: `direction_weights`.
        With `accepted` and `group` of *all* responses, groups that this micro-batch holds whole are scored right here.
        """
        if self._attaches_late:
            self._hooks.attach()
        if self._open is not None:
            raise AttributionError("capture() is open already; one backward pass belongs to one capture")
        check_target(self.config, role, target_scale, sign)
        if not self._begun:
            self.begin()
        layout = Layout.without_ignored_rows(response, tokens, scale, predicted_at)
        if accepted is not None and group is not None:
            self._set_labels(Labels.of(accepted, group, advantages, sign))
        self._check_takes(takes)
        if takes != "directions":
            self._ledger.enter(layout, role, None if self._labels is None else len(self._labels))
        factors = target_factors(self.config, layout, scale, target_scale)
        self._open = self._one_pass(Capture(layout, dict(positions or {})), role, factors, takes)
        try:
            yield
            if self._failure is None:
                self._attempt(self._open.finish)
            if takes != "directions":
                self._ledger.leave(layout, role, self._open.factors)
            self._loss_terms.commit()
            self._batches += self._open.whole
        finally:
            self._open = None
            self._loss_terms.forget_pass()
            self._hooks.forget_calls()
            if self._attaches_late:
                self._hooks.close()

    def direction_weights(self) -> dict[int, float]:
        """How the log-probs of each response count in the contrast of its scope, where that has loss terms; after the
        passes that were captured for scores.

        Where responses share the positions of their prompt (id −1 there), `predicted_at` of `capture` lists the flat
        positions whose logits predict response tokens, and such a pass `takes` the "scores" of the tail alone. The
        "directions" that loss terms need then come from one more pass, of Σ_r `direction_weights()[r]` Σ_t ℓ_t, in
        which all positions of a group, prompts included, have the id of one of its responses; see
        `InfluenceConfig.needs_prompts`.
        """
        mean = self.config.response_reduction == "mean"
        return {
            r: float(scope.contrast[0, i]) / (max(self._ledger.counts.get(r, 1), 1) if mean else 1)
            for scope in self._scopes
            if scope.has_loss_terms
            for i, r in enumerate(scope.members)
        }

    def _check_takes(self, takes: Takes) -> None:
        if takes == "all":
            return
        if self._labels is None:
            raise AttributionError(
                f"takes={takes!r} needs accepted and group at capture(): they say what is to be taken"
            )
        if self.config.needs_prompts:
            raise AttributionError(
                f"takes={takes!r} parts scores of the tail from the direction of one contrast; credit="
                f"{self.config.credit!r}, hessian_mode={self.config.hessian_mode!r}, target={self.config.about!r} and"
                f" exclude_self_response={self.config.exclude_self_response} ask for more: capture a pass in which"
                " every response has its prompt to itself"
            )

    def _one_pass(self, capture: Capture, role: Role, factors: dict[int, float], takes: Takes) -> OnePass:
        receivers = Receivers(self._store, self._loss_terms, self._timing)
        targets = self._ledger.targets
        return OnePass(capture, role, factors, self.config, receivers, self._labels, self._scopes, targets, takes)

    def _set_labels(self, labels: Labels) -> None:
        if self._labels is None:
            self._labels = labels
            self._scopes, self._skipped = build_scopes(labels, self.config, self._loss_term_groups)
        elif not self._labels.same_as(labels):
            raise AttributionError(
                "accepted, group or advantages differ from those given before; call score() or reset() between batches"
            )

    def _receive(self, block: Block, site: Site, gradient: Tensor, x: Tensor) -> None:
        """Called inside the backward pass for every call of a traced module."""
        if self._open is None or self._failure is not None or not self._open.capture.layout.responses:
            return
        started = time.perf_counter()
        self._ledger.fired.add(block)
        if self._open.wants(block):
            is_last = self._hooks.calls[block] == 1
            self._attempt(self._open.receive, block, site, gradient, x, is_last)
        self._ledger.capture_seconds += time.perf_counter() - started

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
        accepted: Tensor | None = None,
        group: Tensor | None = None,
        advantages: Tensor | None = None,
        sign: Tensor | None = None,
        terms: Terms | None = None,
        method: Method | None = None,
        coming: Mapping[str, Tensor] | Literal[True] | None = None,
    ) -> InfluenceTrace:
        """Scores of everything captured since the last call, which is forgotten then.

        `accepted`, `group`, `advantages`, `sign` of all R responses as in `capture`, which may have had them already.

        `terms` is needed for loss-term credit: it runs the model on the given responses and returns every token's own
        term of the step, one after the other, with the sign and scale of what was captured as the step; or [2, N] with
        the tokens' log-probs in the second row, which then have scores, too (`likelier_scores`). Where weights are
        sharded it is called with one response at a time, and with none on ranks that keep the others company; or, as
        `SharedTerms`, with all responses of a group on every rank.

        `method` is how own terms are differentiated, by default the faster one for this model (see `tangent`).
        `coming`: the gradient that the optimizer will be given next, by parameter name; True reads `parameter.grad`.
        The second moment for loss terms is then the one that this step will see.
        """
        started = time.perf_counter()
        if accepted is not None and group is not None:
            self._set_labels(Labels.of(accepted, group, advantages, sign))
        labels = self._checked_labels(terms)
        try:
            failures = [s for s in self.ranks.gather(self._failure and str(self._failure)) if s is not None]
            if failures:  # of any rank: the others cannot score without it
                raise AttributionError(f"capture failed: {failures[0]}") from self._failure
            owners = self._ledger.owners(labels, self.ranks)
            self._ledger.check(self._scopes, self._skipped)
            with torch.no_grad():
                self._score_stored(owners, labels)
                solved = time.perf_counter()
                found: dict[int, Tensor] = {}
                if terms is not None and self.config.wants_loss_term:
                    with self._hooks.paused():
                        found = self._loss_terms.score(
                            self._scopes,
                            self._batches,
                            owners,
                            self._ledger.counts,
                            self._store,
                            labels,
                            terms,
                            method or faster_method(self.model),
                            coming_gradients(self._loss_terms.parameters, coming),
                        )
            trace = self._assembled(labels, found)
            trace.metrics["timing_s/influence_score"] = solved - started
            trace.metrics["timing_s/influence_loss_term"] = time.perf_counter() - solved
            return trace
        finally:
            self.reset()

    def _checked_labels(self, terms: Terms | None) -> Labels:
        if self._labels is None:
            raise AttributionError("score() needs accepted and group: they were given neither here nor to capture()")
        if self.config.wants_loss_term and terms is None:
            raise AttributionError(f"credit={self.config.credit!r} needs `terms`, see the help of score()")
        return self._labels

    def _assembled(self, labels: Labels, loss_terms: dict[int, Tensor]) -> InfluenceTrace:
        """The trace, with what there is to say about it."""
        self._skipped |= self._ledger.drop_non_finite(self._batches, loss_terms)
        trace = assemble(self._batches, self._ledger, labels, loss_terms, self.config)
        here = {group for batch in self._batches for scope in batch.scopes for group in scope.groups}
        elsewhere = {group for scope in self._scopes for group in scope.groups if group not in here}
        trace.skipped = dict.fromkeys(sorted(elsewhere), "other_rank") | self._skipped
        trace.warnings += remarks(self._about_model, self._scopes, self._ledger.counts, self.ranks)
        said = self._ledger.meta(self.config, self.geometry, self._loss_terms.sources)
        trace.meta = {**said, "captures": self._hooks.captures()}
        with_terms = sum(len(scope.loss_term_groups) for scope in self._scopes)
        trace.metrics |= self._ledger.counters(self._batches, labels, self._skipped, with_terms)
        trace.metrics |= self._timing.seconds | {
            "influence_trace/debug_bytes_moved": float(self.ranks.bytes_moved),
            "influence_trace/debug_forward_captures": float(self._hooks.forward_captures.total()),
            "influence_trace/debug_backward_captures": float(self._hooks.backward_captures.total()),
        }
        return trace

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
        captured = {r: self.config.captured(count) for r, count in self._ledger.counts.items()}
        whole = batches_of(mine, self._ledger.lengths, captured, self.config)
        divided = batches_of(split, self._ledger.lengths, captured, self.config)
        for block in self.blocks:
            for batch in whole + divided:
                alone = batch in whole
                if not (block.scored or batch.directed) or (alone and block not in self._ledger.fired):
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
