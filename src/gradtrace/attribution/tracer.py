"""`InfluenceTracer`: which tokens pushed towards the accepted answers, from the gradients of a real backward pass."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradtrace.attribution.capture import Capture
from gradtrace.attribution.collectives import Ranks
from gradtrace.attribution.config import InfluenceConfig
from gradtrace.attribution.errors import AttributionError
from gradtrace.attribution.factors import FactorHooks, sides
from gradtrace.attribution.labels import Labels
from gradtrace.attribution.layout import Layout
from gradtrace.attribution.loss_terms import Terms, loss_term_scores
from gradtrace.attribution.memory import MemoryEstimate, estimate_memory
from gradtrace.attribution.modules import Block, Site, select_blocks
from gradtrace.attribution.result import InfluenceTrace, assemble, counters
from gradtrace.attribution.scopes import Scope, ScopeBatch, batches_of, build_scopes
from gradtrace.attribution.solvers import TokenRows
from gradtrace.attribution.store import StoredFactors, join, padded
from gradtrace.attribution.tangent import Method


class InfluenceTracer:
    """Captures gradient factors of `model` during backward passes and scores response tokens with them.

    ```python
    tracer = InfluenceTracer(model, InfluenceConfig(projection_dim_factor=0))
    with tracer.capture(response=rows, tokens=mask):    # as often as there are micro-batches
        loss.backward()
    trace = tracer.score(accepted=accepted, group=group)
    ```

    The backward pass itself is unchanged: parameters get the same gradients to the last bit. With a
    `process_group`, ranks hold different responses under global ids and call `score` together.
    """

    def __init__(
        self,
        model: nn.Module,
        config: InfluenceConfig | None = None,
        process_group: dist.ProcessGroup | None = None,
        defer_errors: bool = False,
    ) -> None:
        """With `defer_errors` a failure inside a backward pass does not interrupt it: `score` raises it instead."""
        self.model = model
        self.defer_errors = defer_errors
        self.config = config or InfluenceConfig()
        self.blocks = select_blocks(model, self.config)
        self.ranks = Ranks(process_group)
        self._hooks = FactorHooks(self.blocks, self._receive)
        self._open: Capture | None = None
        self._whole: list[ScopeBatch] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything captured since the last `score()`."""
        self._labels: Labels | None = None
        self._scopes: list[Scope] = []
        self._batches: list[ScopeBatch] = []
        self._skipped: dict[int, str] = {}
        self._stored: dict[Block, dict[int, StoredFactors]] = {block: {} for block in self.blocks}
        self._token_counts: dict[int, int] = {}
        self._lengths: dict[int, int] = {}
        self._fired: set[Block] = set()
        self._captures = 0
        self._capture_seconds = 0.0
        self._phases: dict[str, float] = {}
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

    def memory_estimate(self, responses: int, tokens: int, whole_groups: bool = False) -> MemoryEstimate:
        """Bytes that a batch of this size will need, before anything is allocated."""
        return estimate_memory(self.blocks, self.config, responses, tokens, whole_groups)

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
        positions: Mapping[str, Tensor] | None = None,
    ) -> Iterator[None]:
        """The backward pass inside belongs to these rows.

        `response`: long[B], the response id of each batch row, −1 = ignore; long[B, S] for packed rows (then the
        prompt's positions carry the id too). `tokens`: bool[B, S], True where input_ids holds a response token.
        `scale` undoes a normaliser of the loss: scores are those of scale · loss; float[R] gives each response
        its own. `positions` says, for a module that sees only some positions, which (flat indices into B·S).

        `sign`: float[R] of ±1 for an objective that already counts responses with a sign, as a policy-gradient loss
        does with advantages. infl(t→r) is then the effect on the log-prob of r, not on "its loss", so that the
        contrast of accepted and rejected does not count the sign a second time.

        With `accepted` and `group` of *all* responses given here, groups that this micro-batch holds whole are
        scored inside the backward pass and nothing of them is stored, and constant groups cost nothing.
        """
        if self._open is not None:
            raise AttributionError("capture() is open already; one backward pass belongs to one capture")
        layout = Layout.without_ignored_rows(response, tokens, scale)
        if accepted is not None and group is not None:
            self._set_labels(Labels.of(accepted, group, advantages, sign))
        self._check_responses(layout)
        self._open = Capture(layout, dict(positions or {}))
        self._captures += 1
        self._plan(layout)
        try:
            yield
            if self._failure is None:
                for block in list(self._open.parts):
                    self._finish_block(block)
                with torch.no_grad(), self._phase("solve", response):
                    for batch in self._whole:
                        batch.solve_waiting()
            self._token_counts.update(layout.token_counts)
            self._batches += self._whole
        finally:
            self._open = None
            self._whole = []
            self._hooks.forget_calls()

    def _set_labels(self, labels: Labels) -> None:
        if self._labels is None:
            self._labels = labels
            self._scopes, self._skipped = build_scopes(labels, self.config)
        elif not self._labels.same_as(labels):
            raise AttributionError(
                "accepted, group or advantages differ from those given before; call score() or reset() between batches"
            )

    def _check_responses(self, layout: Layout) -> None:
        again = [response for response in layout.responses if response in self._token_counts]
        if again:
            raise AttributionError(
                f"response {again[0]} was captured already: every response has one backward pass per score();"
                " call score() or reset() before the next epoch"
            )
        if self._labels is not None and layout.responses and layout.responses[-1] >= len(self._labels):
            raise AttributionError(
                f"response id {layout.responses[-1]} is out of range: accepted has {len(self._labels)} entries"
            )

    def _plan(self, layout: Layout) -> None:
        """Which scopes this micro-batch holds whole (scored inside the pass), and which responses to store."""
        present = set(layout.responses)
        whole = [scope for scope in self._scopes if present.issuperset(scope.members)]
        captured = {response: self._captured(count) for response, count in layout.token_counts.items()}
        self._whole = batches_of(whole, layout.token_counts, captured, self.config)
        limit = self.config.max_tokens_per_response
        self._whole_positions = [
            padded(
                [torch.cat([layout.tokens_of(r, limit) for r in scope.members]) for scope in batch.scopes],
                batch.width,
            )
            for batch in self._whole
        ]
        scored = {response for scope in whole for response in scope.members}
        wanted = present if self._labels is None else {r for scope in self._scopes for r in scope.members}
        self._to_store = sorted((present & wanted) - scored)

    def _receive(self, block: Block, site: Site, gradient: Tensor, x: Tensor) -> None:
        """Called inside the backward pass for every call of a traced module."""
        if self._open is None or self._failure is not None or not self._open.layout.responses:
            return
        started = time.perf_counter()
        self._fired.add(block)
        # The pass may run under autocast; factors are never rounded to half precision.
        try:
            with torch.no_grad(), torch.autocast(gradient.device.type, enabled=False):
                with self._phase("project", gradient):
                    gradient, x, positions = self._open.wanted(site, gradient, x)
                    self._open.add(block, *sides(block, site, gradient, x), positions)
                if self._hooks.calls[block] == 1:  # known to be the only call: nothing more will come for it
                    self._finish_block(block)
        except Exception as error:
            if not self.defer_errors:
                raise
            self._failure = self._failure or error
        self._capture_seconds += time.perf_counter() - started

    @contextmanager
    def _phase(self, name: str, tensor: Tensor) -> Iterator[None]:
        """Adds up the time of a phase if `profile_timing` asks for it; that makes a GPU wait each time."""
        if not self.config.profile_timing:
            yield
            return
        started = time.perf_counter()
        yield
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        key = f"timing_s/influence_{name}"
        self._phases[key] = self._phases.get(key, 0.0) + time.perf_counter() - started

    def _finish_block(self, block: Block) -> None:
        """All factors of this module are here: score the scopes that are whole, store the rest."""
        capture = self._open
        assert capture is not None
        for batch, positions in zip(self._whole, self._whole_positions, strict=True):
            members = batch.members
            some = capture.parts[block][0].u
            with self._phase("gradients", some):
                gradients = capture.gradients(block, members)
                gradients = self._reduced(gradients, members, capture.layout.token_counts)
                u, v = capture.tokens(block, positions)
            with self._phase("solve", some):
                rows = TokenRows(u.flatten(1, 2), v.flatten(1, 2), batch.width)
                batch.add_later(block, gradients.unflatten(0, (len(batch.scopes), -1)), rows)
        if self._to_store:
            self._store(block, capture)
        del capture.parts[block]

    def _store(self, block: Block, capture: Capture) -> None:
        limit = self.config.max_tokens_per_response
        gradients = capture.gradients(block, self._to_store)
        for response, gradient in zip(self._to_store, gradients, strict=True):
            u, v = (
                side[0] for side in capture.tokens(block, capture.layout.tokens_of(response, limit)[None])
            )
            if self.config.grad_offload_to_cpu:
                gradient, u, v = gradient.cpu(), u.cpu(), v.cpu()
            self._stored[block][response] = StoredFactors(gradient.clone(), u, v)

    def _captured(self, tokens: int) -> int:
        limit = self.config.max_tokens_per_response
        return min(tokens, limit) if limit else tokens

    def _reduced(self, gradients: Tensor, members: list[int], lengths: Mapping[int, int]) -> Tensor:
        """Response gradients as `response_reduction` wants them, turned by `sign`."""
        assert self._labels is not None
        mean = self.config.response_reduction == "mean"
        factors = [self._labels.sign_of(r) / (max(lengths[r], 1) if mean else 1) for r in members]
        return (
            gradients * torch.tensor(factors, dtype=gradients.dtype, device=gradients.device)[:, None, None]
        )

    # ---------------------------------------------------------------- score

    def score(
        self,
        accepted: Tensor | None = None,
        group: Tensor | None = None,
        advantages: Tensor | None = None,
        sign: Tensor | None = None,
        terms: Terms | None = None,
        method: Method = "jvp",
    ) -> InfluenceTrace:
        """Scores of everything captured since the last call, which is forgotten then.

        `accepted`: bool[R], `group`: long[R] for all R responses (not needed if `capture` had them), `advantages`:
        float[R] for contrastive_agg='advantage', `sign` as in `capture`. `terms` is needed for loss-term credit: a
        function that runs the model on the given responses and returns every token's own term of the captured
        objective, with the sign and scale of what was captured.
        """
        started = time.perf_counter()
        if accepted is not None and group is not None:
            self._set_labels(Labels.of(accepted, group, advantages, sign))
        if self._labels is None:
            raise AttributionError(
                "score() needs accepted and group: they were given neither here nor to capture()"
            )
        if self.config.wants_loss_term and terms is None:
            raise AttributionError(
                f"credit={self.config.credit!r} needs `terms`, see the docstring of score()"
            )
        try:
            if self._failure is not None:
                raise AttributionError(f"capture failed: {self._failure}") from self._failure
            owners = self._owners()
            self._check_captured(owners)
            with torch.no_grad():
                self._score_stored(owners)
                solved = time.perf_counter()
                loss_terms = {}
                if terms is not None and self.config.wants_loss_term:
                    with self._hooks.paused():
                        loss_terms = self._loss_terms(terms, method)
            self._drop_non_finite()
            trace = assemble(self._batches, self._token_counts, self._labels, loss_terms, self.config)
            trace.skipped = self._all_skipped()
            trace.metrics = counters(self._batches, self._labels, self._skipped) | {
                "influence_trace/debug_captures": float(self._captures),
                "influence_trace/debug_modules": float(len(self.blocks)),
                "influence_trace/debug_modules_fired": float(len(self._fired)),
                "influence_trace/debug_responses_captured": float(len(owners)),
                "influence_trace/debug_bytes_moved": float(self.ranks.bytes_moved),
            }
            trace.metrics |= self._phases
            trace.metrics["timing_s/influence_capture"] = self._capture_seconds
            trace.metrics["timing_s/influence_score"] = solved - started
            trace.metrics["timing_s/influence_loss_term"] = time.perf_counter() - solved
            return trace
        finally:
            self.reset()

    def _loss_terms(self, terms: Terms, method: Method) -> dict[int, Tensor]:
        """Response → [T_r]. A host whose parameters are sharded over ranks has its own way."""
        return loss_term_scores(self._batches, self.model, self._token_counts, terms, method)

    def _owners(self) -> dict[int, int]:
        """Response → the rank that captured it. Also learns the lengths of the other ranks' responses."""
        labels = self._labels
        assert labels is not None
        last = max(self._token_counts, default=-1)
        if last >= len(labels):
            raise AttributionError(
                f"response id {last} was captured, but accepted has only {len(labels)} entries"
            )
        same_everywhere = (labels.accepted.tolist(), labels.group.tolist())
        owners: dict[int, int] = {}
        for rank, (counts, theirs) in enumerate(self.ranks.gather((self._token_counts, same_everywhere))):
            if theirs != same_everywhere:
                raise AttributionError(f"rank {rank} was given other accepted or group than this one")
            for response in counts:
                if response in owners:
                    raise AttributionError(
                        f"response {response} was captured on ranks {owners[response]} and {rank}: ids are global"
                    )
                owners[response] = rank
            self._lengths.update(counts)
        return owners

    def _check_captured(self, owners: dict[int, int]) -> None:
        if not owners:
            raise AttributionError(
                "nothing was captured: no backward pass ran inside `with tracer.capture(…)`, or all its rows"
                " had response id −1"
            )
        if self._token_counts and not self._fired:
            raise AttributionError(
                f"{self._captures} backward pass(es) ran under capture, but no hook of the {len(self.blocks)} traced"
                " layers fired. Likely causes: the forward pass ran under torch.no_grad() or before the tracer was"
                " made, the loss is detached from the model, or autograd.grad was asked for an input that these"
                " layers do not lead to"
            )
        silent = [block.name for block in self.blocks if block not in self._fired]
        if silent and self._token_counts:
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

    def _score_stored(self, owners: dict[int, int]) -> None:
        """Scopes that no single micro-batch held whole."""
        me = 0 if self.ranks.size == 1 else dist.get_rank(self.ranks.group)
        done = {id(scope) for batch in self._batches for scope in batch.scopes}
        mine, split = [], []
        for scope in self._scopes:
            ranks = {owners.get(response) for response in scope.members}
            if None in ranks:
                self._skipped |= dict.fromkeys(scope.groups, "not_captured")
            elif len(ranks) > 1:
                split.append(scope)
            elif me in ranks and id(scope) not in done:
                mine.append(scope)
        captured = {response: self._captured(count) for response, count in self._token_counts.items()}
        whole = batches_of(mine, self._lengths, captured, self.config)
        shared = batches_of(split, self._lengths, captured, self.config)
        for block in self.blocks:
            if block in self._fired:
                for batch in whole:
                    self._score_batch(block, batch, self._gradients(block, batch.members), Ranks())
            for batch in shared:
                # Only these travel: the response gradients of scopes that are split over ranks.
                gradients = self.ranks.sum(self._gradients(block, batch.members))
                self._score_batch(block, batch, gradients, self.ranks)
            self._stored[block].clear()
        self._batches += whole + shared

    def _gradients(self, block: Block, members: list[int]) -> Tensor:
        """[len(members), k_out, k_in]; zero for those of other ranks, and where the module had no gradient."""
        weight = self.blocks[0].sites[0].module.weight
        assert isinstance(weight, Tensor)
        on_host = self.config.grad_offload_to_cpu and not self.config.force_gpu_compute
        gradients = torch.zeros(
            len(members),
            block.k_out,
            block.k_in,
            dtype=torch.float64 if weight.dtype == torch.float64 else torch.float32,
            device="cpu" if on_host else weight.device,
        )
        for index, response in enumerate(members):
            if response in self._stored[block]:
                gradients[index] = self._stored[block][response].gradient
        return gradients

    def _score_batch(self, block: Block, batch: ScopeBatch, gradients: Tensor, ranks: Ranks) -> None:
        stored = self._stored[block]
        factors = [[(stored.get(r), count) for r, count in counts.items()] for counts in batch.tokens]
        reduced = self._reduced(gradients, batch.members, self._lengths)
        with self._phase("solve", gradients):
            rows = join(factors, batch.width, like=gradients)
            batch.add([block], reduced.unflatten(0, (1, len(batch.scopes), -1)), rows, ranks)

    def _drop_non_finite(self) -> None:
        """A scope with a bad gradient has no scores; it is skipped with a warning that names the place."""
        for batch in self._batches:
            for index, scope in enumerate(batch.scopes):
                found = batch.non_finite(index)
                if found is not None:
                    module, responses = found
                    self._skipped |= dict.fromkeys(scope.groups, "non_finite")
                    batch.tokens[index] = {}
                    warnings.warn(
                        f"group {scope.groups[0]} has no scores: the gradient of response {responses[0]} in {module}"
                        " is not finite",
                        stacklevel=3,
                    )

    def _all_skipped(self) -> dict[int, str]:
        here = {group for batch in self._batches for scope in batch.scopes for group in scope.groups}
        elsewhere = {group for scope in self._scopes for group in scope.groups if group not in here}
        return dict.fromkeys(sorted(elsewhere), "other_rank") | self._skipped
