"""The influence trace beside the weights: what the coming optimizer step does to every token's own term of the loss.

Let J be minus the loss of the mini-batch as its gradient has it: the sum of all tokens' own terms, each linear in the
token's log-prob and entropy with the slopes that it has before the step. (A term whose ratio leaves its clip range by
the step is flat there, and would hide what the gradient did.) Let d be what this gradient contributes to the coming
step. A token's influence is the change of its own term of J from θ to θ + d, in nats; `gradtrace.attribution.parts` has
the two readings of it. One forward pass at θ + d gives the scores of all tokens; log-probs at θ are those of training's
passes.

Two more questions are asked of some groups, by passes over one group each. *On its own prompt*: the same with d of the
gradient of the token's own group, or of each of its responses. *Measured*: what the real step changed, what momentum
and weight decay alone change, and which tokens became likelier where the strongest tokens stand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradtrace.attribution import AttributionError
from gradtrace.attribution.collectives import is_sharded
from gradtrace.attribution.geometry import unwrapped
from gradtrace.attribution.update import (
    learning_rate,
    other_direction,
    second_moment_source,
    step_direction,
    update_rule,
)
from gradtrace.instruments.contract import Backward, Host, Observer, OptimizerStep, Pass, Rows
from gradtrace.instruments.influence import InfluenceTraceConfig
from gradtrace.instruments.influence.plan import StepPlan
from gradtrace.instruments.verify.in_training import TrainingCheck

STRONGEST = 6
"""Tokens of a measured group whose alternatives are looked at."""
GAINED = 2
"""Alternatives that are kept of each: those that gained most."""


@dataclass(eq=False)
class ObservedGroup:
    """A group of the mini-batch under way that passes of its own are made over."""

    group: int
    rows: Rows
    """This process's rows of it."""
    passes: Rows
    """What passes run over: the same, or the whole group where processes share the work."""
    before: Tensor
    """[2, n]: every token's own term of J, and its log-prob."""
    strongest: list[int]
    """Places of its strongest tokens among its n."""
    probabilities: Tensor | None
    """[k, V] of all tokens there, before the step."""
    books: dict[str, float] = field(default_factory=dict)
    """By name of a column: what changed the group's objective, by how much, of this process's rows."""


def influence_observer(host: Host, settings: InfluenceTraceConfig) -> Observer:
    """Return the observer of the configured score: parts of the step, or captured factors."""
    if settings.is_parts:
        return PartsObserver(host, settings)
    from gradtrace.instruments.influence.factors import FactorsObserver

    return FactorsObserver(host, settings)


class PartsObserver(Observer):
    def __init__(self, host: Host, settings: InfluenceTraceConfig) -> None:
        update_rule(unwrapped(host.optimizer))  # raises for an optimizer whose step is not known
        self.host = host
        self.config = settings
        self.measured: list[ObservedGroup] = []
        self.plan: StepPlan | None = None
        self._check = TrainingCheck(host) if settings.verify_every else None
        self._to_verify = False
        self._slopes: dict[int, Tensor] = {}
        """Row → [2, t]: derivatives of the tokens' terms by their log-probs and entropies, before the step."""
        self._gradients: dict[int, dict[str, Tensor]] = {}
        """Group → what its own pass of training brought to `.grad`, where it had one and memory is free."""

    def begin(self, plan: StepPlan) -> None:
        super().begin(plan)
        self.plan, self.measured, self._to_verify, self._gradients = plan, [], plan.verify, {}
        self.table.facts = {"updates": [], "books": [], "alternatives": [], "non_finite": [], "refused": ""}
        self.table.facts["own_gradients"] = {"kept": 0, "recomputed": 0}

    @contextmanager
    def around_backward(self, backward: Backward) -> Iterator[None]:
        group = self._group_to_keep(backward)
        trained = {n: p for n, p in self.host.model.named_parameters() if p.requires_grad} if group is not None else {}
        before = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
        with self.host.keep(backward):
            yield
        if group is not None:
            found = {name: p.grad for name, p in trained.items() if p.grad is not None}
            self._gradients[group] = {n: g - before[n] if n in before else g.clone() for n, g in found.items()}

    def _group_to_keep(self, backward: Backward) -> int | None:
        """The one group of a pass of training, if its own gradient is wanted as a whole and there is room for it."""
        assert self.plan is not None
        groups = self.plan.group[backward.rows].unique().tolist() if bool((backward.rows >= 0).all()) else []
        wanted = set(self.plan.own.tolist()) - set(self.plan.measured.tolist() if self.config.pairwise else [])
        one_process = self.host.ranks.size == 1 and not is_sharded(self.host.model)
        if len(groups) != 1 or groups[0] not in wanted or not one_process:
            return None
        whole = int(((self.plan.group == groups[0]) & self.plan.kept).sum()) == len(backward.rows)
        size = sum(p.numel() * p.element_size() for p in self.host.model.parameters() if p.requires_grad)
        device = next(self.host.model.parameters()).device
        return groups[0] if whole and 3 * size < available_memory(device) else None

    # ------------------------------------------------------------ before the optimizer step

    def before_step(self, update: OptimizerStep) -> None:
        assert self.plan is not None
        coming = self.host.next_gradient()
        if coming is None:
            raise AttributionError(self.host.cannot.get("next_gradient", "no gradient is of the whole rollout"))
        rows, gradient = self.host.own(update), coming.values
        with self.host.aside():
            known = self.host.kept_values(rows, with_slopes)
            self._slopes = rows.split(known[2:])
            weights = rows.weights.repeat_interleave(rows.mask.sum(1)).to(known)
            before = -(known[2:] * known[:2]).sum(0) * weights
            found = self._changes(rows, before, gradient, as_kept=True)
            self._put(update, rows, found, gradient)
            measured = self._groups(self.plan.measured, update)
            for group in sorted({*measured, *self._groups(self.plan.own, update)}):
                one = self._open(group, update, rows, found)
                if "gradient" not in self.host.cannot:
                    self._put_own(one, gradient, coming.clip_factor, pairs=group in measured)
                self.measured += [one] if group in measured else []
            self._measure_momentum(gradient)
        self._verify(update, rows, found)

    def _verify(self, update: OptimizerStep, rows: Rows, found: Tensor) -> None:
        """Hold the first scores of the step against real optimizer steps."""
        if self._check is None or not self._to_verify:
            return
        self._to_verify = False
        try:
            self.table.facts["validity"] = self._check.run(
                rows, found, lambda one: self._objective(one)[0], update.step
            )
        except Exception as error:
            if self.config.on_error == "raise":
                raise
            self.table.facts["unverified"] = str(error)

    def _groups(self, wanted: Tensor, update: OptimizerStep) -> list[int]:
        """Those of these groups that are in the mini-batch, the same in every process."""
        assert self.plan is not None
        if len(wanted) and has_low_precision(self.host.model):
            self.table.facts["refused"] = "the weights are stored in half precision, which rounds away what a step does"
            return []
        here = set(self.plan.group[update.rows].tolist())
        return [group for group in wanted.tolist() if group in here]

    def _changes(
        self,
        rows: Rows,
        before: Tensor,
        gradient: Mapping[str, Tensor],
        of: Mapping[str, Tensor] | None = None,
        as_kept: bool = False,
    ) -> Tensor:
        """float64[n]: of each token's own term of J, along a direction of the coming step."""
        if not learning_rate(self.host.optimizer):
            return torch.zeros_like(before, dtype=torch.float64)
        direction = step_direction(self.host.model, self.host.optimizer, gradient, of)
        if has_low_precision(self.host.model):
            return self.host.derivative(lambda: self.host.values(rows, self._objective)[0], dict(direction)).double()
        with self.host.moved(direction):
            return self.host.values(rows, self._objective, as_kept)[0].double() - before.double()

    def _objective(self, one: Pass) -> Tensor:
        """[2, b, T]: every token's own term of J, which is minus the loss, and its log-prob."""
        slope = torch.zeros(2, *one.mask.shape, dtype=torch.float64, device=one.log_probs.device)
        for place, row in enumerate(one.rows.tolist()):
            if row in self._slopes:
                slope[:, place, one.mask[place]] = self._slopes[row].to(slope)
        loss = slope[0] * one.log_probs.double()
        if one.entropies is not None:
            loss = loss + slope[1] * one.entropies.double()
        return torch.stack([-loss * one.weights[:, None].to(loss), one.log_probs.double()])

    def _put(self, update: OptimizerStep, rows: Rows, found: Tensor, gradient: Mapping[str, Tensor]) -> None:
        self.table.put("influence", rows.split(found.float()))
        self.table.put("no_step", {row: (slope == 0).all(0) for row, slope in self._slopes.items()})
        self.table.put("optimizer_step", dict.fromkeys(rows.ids.tolist(), torch.tensor(update.number)))
        self.table.put("loss_weight", dict(zip(rows.ids.tolist(), rows.weights, strict=True)))
        self.table.facts["updates"].append(
            {
                "optimizer_step": update.number,
                "part": sum(self.host.ranks.gather(float(found.sum()))),
                "second_moment": second_moment_source(self.host.model, self.host.optimizer, gradient),
                "learning_rate": learning_rate(self.host.optimizer),
            }
        )

    # ------------------------------------------------------------ groups

    def _open(self, group: int, update: OptimizerStep, rows: Rows, found: Tensor) -> ObservedGroup:
        assert self.plan is not None
        own, of_rows = rows.pick(rows.ids[self.plan.group[rows.ids] == group]), rows.split(found)
        whole = self.host.shared(update, update.rows[self.plan.group[update.rows] == group].sort().values)
        passes = whole if whole.is_shared else own
        for theirs in self.host.ranks.gather({row: self._slopes[row] for row in own.ids.tolist()}):
            self._slopes.update(theirs)
        mine = torch.cat([found[:0], *(of_rows[row] for row in own.ids.tolist())])
        strongest = mine.abs().argsort(descending=True)[:STRONGEST].sort().values.tolist()
        with self.host.noted_probabilities(own, strongest) as probabilities:
            before = self.host.values(passes, self._objective)
        books = {"change_by_batch": float(mine.sum())}
        return ObservedGroup(group, own, passes, before, strongest, probabilities, books)

    def _put_own(self, one: ObservedGroup, gradient: Mapping[str, Tensor], clip_factor: float, pairs: bool) -> None:
        """Score tokens on their own prompt: by the gradient of the group, or (`pairs`) of each of its responses."""
        assert self.plan is not None
        members = ((self.plan.group == one.group) & self.plan.kept).nonzero().squeeze(-1)
        pairs = pairs and self.config.pairwise
        by_response = []
        for some in members.split(1) if pairs else [members]:
            kept = None if pairs else self._gradients.pop(one.group, None)
            if kept is not None:
                of_them: Mapping[str, Tensor] = {name: clip_factor * value for name, value in kept.items()}
            else:
                theirs = one.passes.pick(one.passes.ids[torch.isin(one.passes.ids, some)])
                of_them = self.host.gradient(theirs, lambda each: -clip_factor * self._objective(each)[0])
            self.table.facts["own_gradients"]["recomputed" if kept is None else "kept"] += 1
            by_response.append(self._changes(one.passes, one.before[0], gradient, of_them))
        found = torch.stack(by_response).sum(0)
        self.table.put("influence_own", one.rows.split(found.float()))
        one.books["change_by_own"] = float(found.sum())
        if pairs:
            effects = torch.stack(by_response).float()
            self.table.put("pairs", {row: values.T for row, values in one.rows.split(effects).items()})
            self.table.put("members", dict.fromkeys(one.rows.ids.tolist(), members))

    def _measure_momentum(self, gradient: Mapping[str, Tensor]) -> None:
        """What the step does to measured groups without this mini-batch's gradient: momentum and weight decay."""
        if not self.measured:
            return
        with self.host.moved(other_direction(self.host.model, self.host.optimizer, gradient)):
            for one in self.measured:
                one.books["change_by_momentum"] = self._change_of(one, self.host.values(one.passes, self._objective))

    @staticmethod
    def _change_of(one: ObservedGroup, now: Tensor) -> float:
        return float((now[0] - one.before[0]).double().sum())

    # ------------------------------------------------------------ after the optimizer step

    def after_step(self, update: OptimizerStep, moved: bool) -> None:
        assert self.plan is not None
        measured, self.measured = self.measured, []
        if not moved:  # the gradient was not finite, and scores mean nothing
            for column in self.table.columns.values():
                for row in update.rows.tolist():
                    column.pop(row, None)
            self.table.facts["non_finite"] += self.plan.group[update.rows].unique().tolist()
            return
        with self.host.aside():
            for one in measured:
                self._compare(one)

    def _compare(self, one: ObservedGroup) -> None:
        """What the real step did to a measured group."""
        with self.host.noted_probabilities(one.rows, one.strongest) as probabilities:
            after = self.host.values(one.passes, self._objective)
        one.books["objective_change"] = self._change_of(one, after)
        of_ranks = self.host.ranks.gather(one.books)
        total = {name: sum(own[name] for own in of_ranks) for name in one.books}
        self.table.facts["books"].append({"group": one.group, **total})
        self.table.put("log_prob_before", one.rows.split(one.before[1].float()))
        self.table.put("log_prob_after", one.rows.split(after[1].float()))
        found = [] if probabilities is None else list(gained(one, probabilities))
        self.table.facts["alternatives"] += [each for own in self.host.ranks.gather(found) for each in own]

    def drop(self) -> None:
        self.measured, self._gradients = [], {}


def gained(one: ObservedGroup, after: Tensor) -> Iterator[dict[str, Any]]:
    """For each of the strongest tokens the alternatives that gained most by the step."""
    assert one.probabilities is not None
    counts = one.rows.mask.sum(1)
    row_of = one.rows.ids.repeat_interleave(counts)
    place_of = torch.cat([torch.arange(int(count)) for count in counts])
    for place, before, now in zip(one.strongest, one.probabilities, after, strict=True):
        best = (now - before).topk(min(GAINED, len(now))).indices.tolist()
        alternatives = [[token, float(before[token]), float(now[token])] for token in best]
        yield {"row": int(row_of[place]), "token": int(place_of[place]), "gained": alternatives}


def with_slopes(one: Pass) -> Tensor:
    """[4, b, T]: log-probs and entropies, and the derivatives of every token's own term of the loss by them."""
    known = [one.log_probs] if one.entropies is None else [one.log_probs, one.entropies]
    with torch.enable_grad():
        for values in known:
            values.requires_grad_()
        found = torch.autograd.grad(one.terms().sum(), known, allow_unused=True)
    for values in known:
        values.requires_grad_(False)
    zeros = torch.zeros_like(one.log_probs, dtype=torch.float64)
    own = [zeros if slope is None else slope.double() for slope in found]
    return torch.stack([*[*(values.double() for values in known), zeros][:2], *[*own, zeros][:2]])


def available_memory(device: torch.device) -> int:
    """Bytes that can still be allocated where the weights are."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with open("/proc/meminfo") as file:
        lines = dict(line.split(":") for line in file)
    return int(lines["MemAvailable"].split()[0]) * 1024


def has_low_precision(model: torch.nn.Module) -> bool:
    """Whether weights are coarser than the steps that move them."""
    return any(p.dtype not in (torch.float32, torch.float64) for p in model.parameters() if p.requires_grad)
