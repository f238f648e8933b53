"""`InfluenceTracer`: which tokens pushed towards the accepted answers, from the gradients of a real backward pass."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradtrace.attribution.capture import Capture
from gradtrace.attribution.collectives import Ranks
from gradtrace.attribution.config import InfluenceConfig
from gradtrace.attribution.errors import AttributionError
from gradtrace.attribution.factors import FactorHooks, sides
from gradtrace.attribution.layout import Layout
from gradtrace.attribution.memory import MemoryEstimate, estimate_memory
from gradtrace.attribution.modules import Block, Site, select_blocks
from gradtrace.attribution.result import InfluenceTrace
from gradtrace.attribution.scopes import Labels, Scope, build_scopes
from gradtrace.attribution.store import StoredFactors, join_rows
from gradtrace.attribution.tangent import Method, directional_derivative

Terms = Callable[[list[int]], Tensor]
"""Responses → their tokens' terms w_t ℓ_t, one after the other: 1-D, summing to the captured objective."""


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
    ) -> None:
        self.model = model
        self.config = config or InfluenceConfig()
        self.blocks = select_blocks(model, self.config)
        self.ranks = Ranks(process_group)
        self._hooks = FactorHooks(self.blocks, self._receive)
        self._open: Capture | None = None
        self.reset()

    def reset(self) -> None:
        """Forget everything captured since the last `score()`."""
        self._labels: Labels | None = None
        self._scopes: list[Scope] = []
        self._scope_of: dict[int, Scope] = {}
        self._skipped: dict[int, str] = {}
        self._stored: dict[Block, dict[int, StoredFactors]] = {block: {} for block in self.blocks}
        self._token_counts: dict[int, int] = {}
        self._lengths: dict[int, int] = {}
        self._fired: set[Block] = set()
        self._captures = 0
        self._capture_seconds = 0.0

    def close(self) -> None:
        """Remove the hooks from the model."""
        self._hooks.close()

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
        scale: float = 1.0,
        positions: Mapping[str, Tensor] | None = None,
    ) -> Iterator[None]:
        """The backward pass inside belongs to these rows.

        `response`: long[B], the response id of each batch row, −1 = ignore; long[B, S] for packed rows (then the
        prompt's positions carry the id too). `tokens`: bool[B, S], True where input_ids holds a response token.
        `scale` undoes a normaliser of the loss: scores are those of scale · loss. `positions` says, for a
        module that sees only some positions, which (flat indices into B·S).

        With `accepted` and `group` of *all* responses given here, groups that this micro-batch holds whole are
        scored inside the backward pass and nothing of them is stored, and constant groups cost nothing.
        """
        if self._open is not None:
            raise AttributionError("capture() is open already; one backward pass belongs to one capture")
        layout = Layout.of(response, tokens, scale)
        if accepted is not None and group is not None:
            self._set_labels(Labels.of(accepted, group, advantages))
        self._check_responses(layout)
        self._open = Capture(layout, dict(positions or {}))
        self._captures += 1
        try:
            yield
            for block in list(self._open.parts):
                self._finish_block(block)
            self._token_counts.update(layout.token_counts)
        finally:
            self._open = None
            self._hooks.forget_calls()

    def _set_labels(self, labels: Labels) -> None:
        if self._labels is None:
            self._labels = labels
            self._scopes, self._skipped = build_scopes(labels, self.config)
            self._scope_of = {response: scope for scope in self._scopes for response in scope.members}
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

    def _receive(self, block: Block, site: Site, gradient: Tensor, x: Tensor) -> None:
        """Called inside the backward pass for every call of a traced module."""
        if self._open is None:
            return
        started = time.perf_counter()
        self._fired.add(block)
        # The pass may run under autocast; factors are never rounded to half precision.
        with torch.no_grad(), torch.autocast(gradient.device.type, enabled=False), self._timed(gradient):
            self._open.add(block, site, *sides(block, site, gradient, x))
            if self._hooks.calls[block] == 1:  # known to be the only call: nothing more will come for it
                self._finish_block(block)
        self._capture_seconds += time.perf_counter() - started

    @contextmanager
    def _timed(self, tensor: Tensor) -> Iterator[None]:
        yield
        if self.config.profile_timing and tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)

    def _finish_block(self, block: Block) -> None:
        """All factors of this module are here: score the groups that are whole, store the rest."""
        assert self._open is not None
        layout = self._open.layout
        present = set(layout.responses)
        wanted = present if self._labels is None else {r for r in present if r in self._scope_of}
        whole: set[int] = set()
        for scope in self._scopes:
            if present.issuperset(scope.members):
                self._score_whole(block, scope)
                whole.update(scope.members)
        for response in sorted(wanted - whole):
            self._store(block, response)
        del self._open.parts[block]

    def _score_whole(self, block: Block, scope: Scope) -> None:
        capture, members = self._open, scope.members
        assert capture is not None
        counts = capture.layout.token_counts
        gradients = self._reduce(capture.gradients(block, members), [counts[r] for r in members])
        factors = [capture.tokens(block, r, self.config.max_tokens_per_response) for r in members]
        rows, owner = join_rows(
            factors, [self._captured(counts[r]) for r in members], list(range(len(members))), like=gradients
        )
        scope.add(block, gradients, rows, members, owner, Ranks())

    def _store(self, block: Block, response: int) -> None:
        capture = self._open
        assert capture is not None
        u, v, token = capture.tokens(block, response, self.config.max_tokens_per_response)
        gradient = capture.gradient(block, response)
        if self.config.grad_offload_to_cpu:
            gradient, u, v = gradient.cpu(), u.cpu(), v.cpu()
        self._stored[block][response] = StoredFactors(gradient, u, v, token)

    def _captured(self, tokens: int) -> int:
        limit = self.config.max_tokens_per_response
        return min(tokens, limit) if limit else tokens

    def _reduce(self, gradients: Tensor, token_counts: list[int]) -> Tensor:
        """Response gradients as `response_reduction` wants them."""
        if self.config.response_reduction == "sum":
            return gradients
        lengths = torch.tensor(token_counts, dtype=gradients.dtype, device=gradients.device).clamp(min=1)
        return gradients / lengths[:, None, None]

    # ---------------------------------------------------------------- score

    def score(
        self,
        accepted: Tensor | None = None,
        group: Tensor | None = None,
        advantages: Tensor | None = None,
        terms: Terms | None = None,
        method: Method = "jvp",
    ) -> InfluenceTrace:
        """Scores of everything captured since the last call, which is forgotten then.

        `accepted`: bool[R], `group`: long[R] for all R responses (not needed if `capture` had them), `advantages`:
        float[R] for contrastive_agg='advantage'. `terms` is needed for loss-term credit: a function that runs
        the model on the given responses and returns every token's own term of the captured objective.
        """
        started = time.perf_counter()
        if accepted is not None and group is not None:
            self._set_labels(Labels.of(accepted, group, advantages))
        if self._labels is None:
            raise AttributionError(
                "score() needs accepted and group: they were given neither here nor to capture()"
            )
        if self.config.wants_loss_term and terms is None:
            raise AttributionError(
                f"credit={self.config.credit!r} needs `terms`, see the docstring of score()"
            )
        try:
            owners = self._owners()
            self._check_captured(owners)
            with torch.no_grad():
                self._score_stored(owners)
                solved = time.perf_counter()
                loss_terms = self._loss_terms(terms, method) if terms and self.config.wants_loss_term else {}
            trace = self._collect(owners, loss_terms)
            trace.metrics["timing_s/influence_capture"] = self._capture_seconds
            trace.metrics["timing_s/influence_score"] = solved - started
            trace.metrics["timing_s/influence_loss_term"] = time.perf_counter() - solved
            return trace
        finally:
            self.reset()

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
        mine, split = [], []
        for scope in self._scopes:
            ranks = {owners.get(response) for response in scope.members}
            if None in ranks:
                self._skip(scope, "not_captured")
            elif len(ranks) > 1:
                split.append(scope)
            elif me in ranks and not scope.complete:
                mine.append(scope)
        for block in self.blocks:
            for scope in mine:
                if block in self._fired:
                    self._score_scope(block, scope, self._member_gradients(block, scope), Ranks())
            for scope, gradients in zip(split, self._shared_gradients(block, split), strict=True):
                self._score_scope(block, scope, gradients, self.ranks)
            self._stored[block].clear()

    def _member_gradients(self, block: Block, scope: Scope) -> Tensor:
        stored = self._stored[block]
        return torch.stack([self._to_compute(stored[response].gradient) for response in scope.members])

    def _shared_gradients(self, block: Block, scopes: list[Scope]) -> list[Tensor]:
        """Gradients of all members of scopes that are split over ranks: only these travel, once per module."""
        if not scopes:
            return []
        reference = next(iter(self._stored[block].values()), None)
        parameter = self.blocks[0].sites[0].module.weight
        device = parameter.device if reference is None else self._to_compute(reference.gradient).device
        dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        members = [response for scope in scopes for response in scope.members]
        gradients = torch.zeros(len(members), block.k_out, block.k_in, dtype=dtype, device=device)  # type: ignore[arg-type]
        for index, response in enumerate(members):
            if response in self._stored[block]:
                gradients[index] = self._to_compute(self._stored[block][response].gradient)
        return list(self.ranks.sum(gradients).split([len(scope.members) for scope in scopes]))

    def _score_scope(self, block: Block, scope: Scope, gradients: Tensor, ranks: Ranks) -> None:
        local = [response for response in scope.members if response in self._token_counts]
        nothing = StoredFactors.empty(gradients)
        factors = [self._stored[block].get(response, nothing) for response in local]
        rows, owner = join_rows(
            [(self._to_compute(kept.u), self._to_compute(kept.v), kept.token) for kept in factors],
            [self._captured(self._token_counts[response]) for response in local],
            [scope.members.index(response) for response in local],
            like=gradients,
        )
        reduced = self._reduce(gradients, [self._lengths[response] for response in scope.members])
        scope.add(block, reduced, rows, local, owner, ranks)

    def _to_compute(self, tensor: Tensor) -> Tensor:
        """Offloaded factors go back to the model's device only if asked to."""
        if self.config.grad_offload_to_cpu and self.config.force_gpu_compute:
            return tensor.to(self.blocks[0].sites[0].module.weight.device)  # type: ignore[arg-type]
        return tensor

    def _skip(self, scope: Scope, reason: str) -> None:
        for group in scope.groups:
            self._skipped[group] = reason

    # ---------------------------------------------------------------- results

    def _loss_terms(self, terms: Terms, method: Method) -> dict[int, Tensor]:
        """Response → [T_r]: the derivative of every token's own term along the direction its score is about."""
        scores: dict[int, Tensor] = {}
        for scope in self._scored_scopes():
            if self.config.exclude_self_response:  # every response has a direction of its own
                parts = [(scope.members.index(response), [response]) for response in scope.local]
            else:
                parts = [(0, scope.local)]
            for row, responses in parts:
                direction = {
                    block.parameter_name: block.weight_direction(found[row])
                    for block, found in scope.directions.items()
                }
                scores.update(self._terms_along(direction, responses, terms, method))
            scope.directions.clear()
        return scores

    def _terms_along(
        self, direction: dict[str, Tensor], responses: list[int], terms: Terms, method: Method
    ) -> dict[int, Tensor]:
        lengths = [self._token_counts[response] for response in responses]
        with self._hooks.paused():
            values = directional_derivative(self.model, lambda: terms(responses), direction, method)
        if values.shape != (sum(lengths),):
            raise AttributionError(
                f"terms({responses}) returned {list(values.shape)}; these responses have {sum(lengths)} tokens, and"
                " it must return one term for each, in order, in one dimension"
            )
        return dict(zip(responses, values.split(lengths), strict=True))

    def _scored_scopes(self) -> list[Scope]:
        return [
            scope
            for scope in self._scopes
            if scope.kernel is not None and scope.local and scope.groups[0] not in self._skipped
        ]

    def _drop_non_finite(self) -> None:
        for scope in self._scored_scopes():
            found = scope.non_finite()
            if found is not None:
                module, responses = found
                self._skip(scope, "non_finite")
                warnings.warn(
                    f"group {scope.groups[0]} has no scores: the gradient of response {responses[0]} in {module} is"
                    " not finite",
                    stacklevel=4,
                )

    def _collect(self, owners: dict[int, int], loss_terms: dict[int, Tensor]) -> InfluenceTrace:
        assert self._labels is not None
        total = len(self._labels)
        self._drop_non_finite()
        scored = self._scored_scopes()
        for scope in self._scopes:
            if scope not in scored:
                for group in scope.groups:
                    self._skipped.setdefault(group, "other_rank")
        like = next((scope.kernel for scope in scored if scope.kernel is not None), torch.zeros(0))
        position = [like.new_empty(0) for _ in range(total)]
        rest = like.new_zeros(total)
        kernel = like.new_full((total, total), torch.nan)
        pairwise: dict[int, tuple[list[int], Tensor]] = {}
        for scope in scored:
            assert scope.position is not None and scope.kernel is not None
            members = torch.tensor(scope.members)
            kernel[members[:, None], members] = scope.kernel
            captured = [self._captured(self._token_counts[response]) for response in scope.local]
            through = (scope.kernel * scope.contrast.to(scope.kernel)).sum(1)
            starts = torch.tensor([0, *captured]).cumsum(0).tolist()
            for response, start, count in zip(scope.local, starts, captured, strict=False):
                length = self._token_counts[response]
                position[response] = like.new_full((length,), torch.nan)
                position[response][:count] = scope.position[start : start + count]
                whole = through[scope.members.index(response)]
                if self.config.response_reduction == "mean":
                    whole = whole * max(length, 1)
                rest[response] = whole - scope.position[start : start + count].sum()
                if scope.pairwise is not None:
                    pairwise[response] = (scope.members, scope.pairwise[start : start + count])
        return InfluenceTrace(
            position_scores=position,
            loss_term_scores=self._loss_term_list(position, loss_terms),
            rest_scores=rest,
            response_kernel=kernel,
            skipped=self._skipped,
            metrics=self._metrics(scored, owners),
            credit=self.config.credit,
            _pairwise=pairwise,
        )

    def _loss_term_list(self, position: list[Tensor], loss_terms: dict[int, Tensor]) -> list[Tensor] | None:
        if not self.config.wants_loss_term:
            return None
        scored = {response for scope in self._scored_scopes() for response in scope.local}
        return [
            loss_terms[response] if response in scored else scores.new_empty(0)
            for response, scores in enumerate(position)
        ]

    def _metrics(self, scored: list[Scope], owners: dict[int, int]) -> dict[str, float]:
        assert self._labels is not None
        mixed = len(self._labels.mixed_groups())
        total = len(self._labels.groups())
        solvers: dict[str, int] = {}
        for scope in scored:
            for name, number in scope.solvers.items():
                solvers[name] = solvers.get(name, 0) + number
        rows = sum(len(scope.position) for scope in scored if scope.position is not None)
        metrics = {
            "influence_trace/selected_responses": sum(len(scope.local) for scope in scored),
            "influence_trace/selected_prompts": sum(len(scope.groups) for scope in scored),
            "influence_trace/uid_total": total,
            "influence_trace/uid_constant": total - mixed,
            "influence_trace/uid_mixed": mixed,
            "influence_trace/rows_emitted": rows,
            "influence_trace/debug_captures": self._captures,
            "influence_trace/debug_modules": len(self.blocks),
            "influence_trace/debug_modules_fired": len(self._fired),
            "influence_trace/debug_responses_captured": len(owners),
            "influence_trace/debug_groups_not_captured": count_of(self._skipped, "not_captured"),
            "influence_trace/debug_groups_non_finite": count_of(self._skipped, "non_finite"),
            "influence_trace/debug_bytes_moved": self.ranks.bytes_moved,
        }
        metrics |= {f"influence_trace/debug_solver_{name}": number for name, number in solvers.items()}
        return {name: float(value) for name, value in metrics.items()}


def count_of(skipped: dict[int, str], reason: str) -> int:
    return sum(1 for value in skipped.values() if value == reason)
