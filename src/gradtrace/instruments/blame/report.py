"""Who did it: an event of one training step, shared out to prompts, responses and tokens, from the traces of a run.

Every list of shares adds up to the event, whatever was left out of what is shown. What a quantity's event is:

grad_norm   the squared gradient norms of the step's optimizer steps, exactly (the blame trace)
entropy     the entropy change that the update makes, by the probe's shares; without a probe in that step, the
            difference of the batch's mean entropy from the step before: who was sampled, not what the update did
reward, length, kl   the difference of the batch's mean from the step before
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from gradtrace.errors import GradtraceError
from gradtrace.instruments.blame import BLAME
from gradtrace.instruments.entropy_probe import ENTROPY_PROBE
from gradtrace.instruments.entropy_trace import ENTROPY_TRACE
from gradtrace.trace.reader import RunReader
from gradtrace.trace.table import StepTable
from gradtrace.trace.token_text import TokenBytes, pieces

WHAT = ("grad_norm", "entropy", "reward", "length", "kl")
METRIC = {
    "grad_norm": "actor/grad_norm",
    "entropy": "actor/entropy",
    "reward": "critic/rewards/mean",
    "length": "response_length/mean",
}


@dataclass(frozen=True)
class Part:
    """A prompt, a response or a token, and what it has to do with the event."""

    share: float
    """Of the event: a fraction of it for grad_norm, else in the quantity's own unit."""
    text: str
    group: int = -1
    response: int = -1
    """Its place among the responses to its prompt."""
    position: int = -1
    note: str = ""


@dataclass(frozen=True)
class GradientReport:
    what: str
    step: int
    sentence: str
    unit: str
    prompts: list[Part] = field(default_factory=list)
    responses: list[Part] = field(default_factory=list)
    tokens: list[Part] = field(default_factory=list)
    vocabulary: list[Part] = field(default_factory=list)
    """Shares of equal tokens added up."""
    rest: list[Part] = field(default_factory=list)
    """What no response did: clipping, momentum, weight decay."""
    cancelled: list[Part] = field(default_factory=list)
    """Tokens that the step moved against their own advantage, and who outweighed them; share: change of log-prob."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def blame(run: RunReader, what: str, step: int | None = None, top: int = 10) -> GradientReport:
    """`step`: None takes the one with the most to explain."""
    if what not in WHAT:
        raise GradtraceError(f"--what {what}: it is one of {', '.join(WHAT)}")
    step = _most_eventful(run, what) if step is None else step
    if what == "grad_norm":
        return gradient_report(run.step_table(step, BLAME), run.token_bytes, top)
    if what == "entropy" and step in run.steps(ENTROPY_PROBE):
        return _probe(run, run.step_table(step, ENTROPY_PROBE), top)
    return _difference(run, what, step, top)


def _kinds_with(what: str) -> tuple[str, ...]:
    return {"grad_norm": (BLAME,), "kl": (BLAME,), "entropy": (ENTROPY_PROBE, ENTROPY_TRACE)}.get(
        what, (BLAME, ENTROPY_TRACE)
    )


def _most_eventful(run: RunReader, what: str) -> int:
    stored = {step for kind in _kinds_with(what)[:1] for step in run.steps(kind)}
    stored = stored or {step for kind in _kinds_with(what) for step in run.steps(kind)}
    if not stored:
        kind = _kinds_with(what)[0]
        traces = [run.step(ENTROPY_TRACE, step) for step in run.steps(ENTROPY_TRACE)[:1]]
        imported = any("imported_from" in trace.meta for trace in traces)
        advice = "train with trainer.traces=true"
        if imported:
            advice = "it was imported, and only a training step has one; reward and length can be asked about"
        raise GradtraceError(f"{run.path} has no {kind} of any step, which --what {what} reads: {advice}")
    metric = METRIC.get(what, "")
    rows = [row for row in run.metrics()[0] if isinstance(row.get(metric), int | float)]
    values = {row["step"]: float(row[metric]) for row in rows}
    known = sorted(stored & values.keys())
    if not known:
        return max(stored)
    if what == "grad_norm":
        return max(known, key=lambda step: values[step])
    changes = {later: abs(values[later] - values[earlier]) for earlier, later in itertools.pairwise(known)}
    return max(changes, key=lambda step: changes[step]) if changes else known[0]


class _Batch:
    """Texts and places of one stored step."""

    def __init__(self, token_bytes: TokenBytes | None, table: StepTable) -> None:
        self.table = table
        self.token_bytes = token_bytes
        self.place = np.zeros(table.n_responses, np.int64)
        for _, index, r in table.everyone():
            self.place[r] = index
        self.owner = np.repeat(np.arange(table.n_responses), table.lengths)

    def texts(self, r: int) -> list[str]:
        return pieces(self.table.ids(r), self.token_bytes, continues=True)

    def name(self, r: int) -> str:
        return f"p{int(self.table.need('group_id')[self.table.group[r]])} r{self.place[r]}"

    def prompts(self, shares: np.ndarray, top: int) -> list[Part]:
        """`shares`: one for each response."""
        sums = np.bincount(self.table.group, shares, self.table.n_groups)
        return [
            Part(float(sums[g]), "".join(pieces(self.table.prompt(g), self.token_bytes)), group=int(g))
            for g in _largest(sums, top)
            if sums[g]
        ]

    def responses(self, shares: np.ndarray, top: int, notes: Sequence[str] = ()) -> list[Part]:
        return [
            Part(
                float(shares[r]),
                "".join(self.texts(r)),
                int(self.table.group[r]),
                int(self.place[r]),
                note=notes[r] if notes else f"reward {self.table.need('reward')[r]:g}",
            )
            for r in _largest(shares, top)
        ]

    def token(self, t: int, share: float, note: str = "") -> Part:
        r = int(self.owner[t])
        position = int(t - self.table.offsets[r])
        return Part(share, self.texts(r)[position], int(self.table.group[r]), int(self.place[r]), position, note)

    def tokens(self, shares: np.ndarray, top: int) -> list[Part]:
        return [self.token(int(t), float(shares[t])) for t in _largest(shares, top)]

    def lists(
        self, responses: np.ndarray, tokens: np.ndarray | None, top: int, notes: Sequence[str] = ()
    ) -> dict[str, list[Part]]:
        """All that a report lists, from the shares of responses and, where an event has them, of tokens."""
        found = {"prompts": self.prompts(responses, top), "responses": self.responses(responses, top, notes)}
        if tokens is not None:
            found |= {"tokens": self.tokens(tokens, top), "vocabulary": self.vocabulary(tokens, top)}
        return found

    def vocabulary(self, shares: np.ndarray, top: int) -> list[Part]:
        ids, where = np.unique(self.table.token_id, return_inverse=True)
        sums, counts = np.bincount(where, shares), np.bincount(where)
        texts = pieces(ids, self.token_bytes)
        return [Part(float(sums[i]), texts[i], note=f"×{counts[i]}") for i in _largest(sums, top)]


def _largest(values: np.ndarray, top: int) -> list[int]:
    return np.argsort(-np.abs(np.nan_to_num(values)), kind="stable")[:top].tolist()


# ---------------------------------------------------------------- the gradient


def gradient_report(table: StepTable, token_bytes: TokenBytes | None, top: int) -> GradientReport:
    """Of one step of a blame trace."""
    batch = _Batch(token_bytes, table)
    updates = [u for u in table.first.meta.get("updates", []) if isinstance(u, dict)]
    broken = table.first.meta.get("skipped") or []
    if not updates:
        return _broken(batch, top, broken)
    square = {int(update["number"]): float(update["grad_norm"]) ** 2 for update in updates}
    total = sum(square.values()) or 1.0
    weight = np.array([square.get(int(number), 0.0) / total for number in table.need("optimizer_step")])
    shares = table.need("grad_share") * weight
    tokens = table.need("token_grad_share") * weight[batch.owner]
    norms = [
        f"‖g_r‖ {norm:.3g}, reward {reward:g}"
        for norm, reward in zip(table.need("grad_norm"), table.need("reward"), strict=True)
    ]
    (first,) = batch.responses(shares, 1)
    who = f"{first.share:.0%} of it by response {first.response} to prompt {first.group}"
    most = max(float(update["grad_norm"]) for update in updates)
    return GradientReport(
        "grad_norm",
        table.step,
        f"Step {table.step}: the gradient of {len(updates)} optimizer step(s), the largest of norm {most:.3g}; {who}.",
        "share of ‖g‖²",
        **batch.lists(shares, tokens, top, norms),
        rest=_rest(updates),
        cancelled=_cancelled(batch, top),
    )


def _rest(updates: list[dict[str, Any]]) -> list[Part]:
    """What no response did, over the step's optimizer steps; momentum and decay are shares of the optimizer's move."""
    parts = [
        Part(float(update["clip_factor"]) ** 2 - 1.0, "clipping", note=f"of optimizer step {int(update['number'])}")
        for update in updates
        if float(update.get("clip_factor", 1.0)) < 1.0
    ]
    for text, key in (("momentum", "from_momentum"), ("weight decay", "from_decay")):
        mean = float(np.mean([float(update.get(key, 0.0)) for update in updates]))
        parts.append(Part(mean, text, note=f"of the optimizer's move, mean of {len(updates)} optimizer steps"))
    return [part for part in parts if abs(part.share) >= 5e-4]


def _broken(batch: _Batch, top: int, skipped: Sequence[int]) -> GradientReport:
    """No optimizer step was made: the responses whose own gradient is not finite come first, then the largest."""
    norms = batch.table.need("grad_norm").astype(np.float64)
    order = np.where(np.isfinite(norms), norms, np.inf)
    bad = int((~np.isfinite(norms)).sum())
    return GradientReport(
        "grad_norm",
        batch.table.step,
        f"Step {batch.table.step}: the gradient was not finite and {len(skipped)} optimizer step(s) were skipped; "
        f"{bad} of {len(norms)} responses have a gradient that is not finite.",
        "‖g_r‖",
        responses=batch.responses(np.nan_to_num(order, posinf=1e30), top),
    )


def _cancelled(batch: _Batch, top: int) -> list[Part]:
    advantages, push = batch.table.column("advantage"), batch.table.need("push")
    if advantages is None or batch.table.column("opponent") is None:
        return []
    advantage = advantages[batch.owner]
    against = np.where(push * advantage < 0, np.abs(push * advantage), 0.0)
    return [
        batch.token(t, float(push[t]), f"advantage {advantage[t]:+.2f}; {_outweighed(batch, int(batch.owner[t]))}")
        for t in _largest(against, top)
        if against[t] > 0
    ]


def _outweighed(batch: _Batch, r: int) -> str:
    """Who pulls against response r: a sibling, or a response to another prompt."""
    table = batch.table
    opponent = int(table.need("opponent")[r])
    if opponent < 0:
        return "no response opposes its own"
    kind = "its sibling" if table.group[opponent] == table.group[r] else "another prompt's"
    sums = (f"{name} {table.need(f'product_{name}')[r]:+.3f}" for name in ("self", "siblings", "others"))
    return f"most against it: {kind} {batch.name(opponent)} (products of gradients: {', '.join(sums)})"


# ---------------------------------------------------------------- entropy, by the probe


def _probe(run: RunReader, table: StepTable, top: int) -> GradientReport:
    batch, meta = _Batch(run.token_bytes, table), table.first.meta
    shares = table.need("share")
    predicted = float(meta.get("delta_h_predicted", shares.sum()))
    known = {"momentum": meta.get("momentum_share"), "weight decay": meta.get("decay_share")}
    rest = [Part(float(value), name) for name, value in known.items() if isinstance(value, int | float)]
    measured = meta.get("delta_h_measured")
    beside = f", measured {measured:+.4f}" if isinstance(measured, int | float) else ""
    return GradientReport(
        "entropy",
        table.step,
        f"Step {table.step}: its first update changes entropy by {predicted:+.4f} nats per token (predicted{beside}).",
        "nats per token",
        **batch.lists(shares, table.need("token_share"), top),
        rest=rest,
    )


# ---------------------------------------------------------------- a mean, beside that of the step before


def _difference(run: RunReader, what: str, number: int, top: int) -> GradientReport:
    kind = next((kind for kind in _kinds_with(what)[::-1] if number in run.steps(kind)), None)
    if kind is None or kind == ENTROPY_PROBE:
        raise GradtraceError(f"step {number} of {run.path} has no trace that --what {what} can read")
    table = run.step_table(number, kind)
    if what == "kl" and table.column("reference_gap") is None:
        raise GradtraceError(
            f"--what kl: step {number} has no reference log-probs; train with algorithm.kl_coef above 0"
        )
    earlier = [other for other in run.steps(kind) if other < number]
    batch = _Batch(run.token_bytes, table)
    before = _values(run.step_table(earlier[-1], kind), what).mean() if earlier else 0.0
    values = _values(table, what).astype(np.float64)
    shares = (values - before) / max(1, len(values))
    is_token = what in ("entropy", "kl")
    responses = np.bincount(batch.owner, shares, table.n_responses) if is_token else shares
    notes = [] if is_token else [f"{float(v):.3g}" for v in values]
    than = f"{before:.4g} in step {earlier[-1]}" if earlier else "0, there being no step before it"
    no_probe = " No probe was stored for it: this says who was sampled, not what the update did."
    return GradientReport(
        what,
        number,
        f"Step {number}: the mean is {values.mean():.4g}, against {than}.{no_probe if what == 'entropy' else ''}",
        {"reward": "reward", "length": "tokens"}.get(what, "nats per token"),
        **batch.lists(responses, shares if is_token else None, top, notes),
    )


def _values(table: StepTable, what: str) -> np.ndarray:
    return table.need({"kl": "reference_gap"}.get(what, what))
